"""Sockets, clock, files and processes around the rules, and the node's side of the connection."""

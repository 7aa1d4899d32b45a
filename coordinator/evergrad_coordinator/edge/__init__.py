"""Sockets, time, files and processes around the rules, and a node's side of the connection."""

"""The rules that decide which nodes train together. Pure: no clock, no sockets, no files, no randomness."""

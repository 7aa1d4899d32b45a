"""The command line: one module a command; each parses, calls, prints and returns an exit code."""

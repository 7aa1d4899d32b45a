"""The coordinator of a run, and the protocol and rules that operator and trainer share.

This package uses only the standard library.
"""

"""Checks that need the machine, made before the first step."""

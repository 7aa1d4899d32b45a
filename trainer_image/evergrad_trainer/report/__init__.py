"""The report of a run: facts from its files, as one self-contained page and as text. Also compares two
runs."""

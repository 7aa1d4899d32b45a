"""Commands and pages for files and runs of this machine."""

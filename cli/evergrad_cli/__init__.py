"""The command ``evergrad``: commands for files and for a cluster. Installs without torch."""

__version__ = "0.2.0"

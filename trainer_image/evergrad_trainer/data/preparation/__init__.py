"""Converts source files to prepared data. The entry point is ``evergrad_trainer.data.prepare``."""

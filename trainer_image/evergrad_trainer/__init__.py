"""The trainer: one TrainingRun file in, a trained model and its evidence out."""

__version__ = "0.2.0"

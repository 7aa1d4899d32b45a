"""The operator's package. Reads TrainingRuns; never imports the trainer."""

"""Options of pretraining and of recipes that are derived from it: none, because sections of the file contain
all settings."""

from evergrad_trainer.task import Section


class PretrainOptions(Section):
    """``spec.training.options`` of pretraining."""

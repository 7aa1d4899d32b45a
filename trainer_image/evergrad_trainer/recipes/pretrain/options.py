"""Options of pretraining, and of recipes derived from it: none, since the sections of the file say all it
needs."""

from evergrad_trainer.task import Section


class PretrainOptions(Section):
    """``spec.training.options`` of pretraining."""

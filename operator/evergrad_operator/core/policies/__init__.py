"""Decides what to do with a run, and why. Pure: ``decide`` maps an observation and a time to a decision."""

from evergrad_operator.core.decision import Action, Bounds, Decision, PodDeletion
from evergrad_operator.core.policies.decide import decide

__all__ = ["Action", "Bounds", "Decision", "PodDeletion", "decide"]

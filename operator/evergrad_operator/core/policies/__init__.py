"""Decides which actions to take for a run, and why. Pure: ``decide`` maps an observation and a time to a
decision."""

from evergrad_operator.core.decision import Action, Decision, NodeBounds, PodDeletion
from evergrad_operator.core.policies.decide import decide

__all__ = ["Action", "Decision", "NodeBounds", "PodDeletion", "decide"]

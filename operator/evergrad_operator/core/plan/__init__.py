"""The objects that a decision asks for: one builder a kind, and ``plan_children`` for the whole set. Pure."""

from evergrad_operator.core.plan.children import Deletion, Plan, plan_children

__all__ = ["Deletion", "Plan", "plan_children"]

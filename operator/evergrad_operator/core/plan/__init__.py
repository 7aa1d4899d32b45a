"""The objects that a decision asks for: one builder a kind, and ``plan_children`` for the whole set. Pure."""

from evergrad_operator.core.plan.children import Deletion, ObjectPlan, plan_children

__all__ = ["Deletion", "ObjectPlan", "plan_children"]

"""Builds the objects that a decision requires: one builder per kind, and ``plan_children`` for all. Pure."""

from evergrad_operator.core.plan.children import Deletion, ObjectPlan, plan_children

__all__ = ["Deletion", "ObjectPlan", "plan_children"]

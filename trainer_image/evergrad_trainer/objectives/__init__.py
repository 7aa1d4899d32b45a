"""Objectives: from a micro-batch to a sum of losses."""

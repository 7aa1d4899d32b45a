"""Planned faults for ``evergrad run --chaos``: kills, freezes and departures of nodes, drawn by a seed.

A package of its own, so that the images carry no program that kills processes at random.
"""

"""The part of Evergrad that a training script of your own may import: ``evergrad.elastic``.

Standard library only.
"""

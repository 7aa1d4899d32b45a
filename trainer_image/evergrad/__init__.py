"""What a training script of your own may import to know of Evergrad: ``evergrad.elastic``.

Standard library only.
"""

"""The life of a training process: joining a world, training in it, leaving it."""

"""The stages of a training process: join a world, train in it, leave it."""

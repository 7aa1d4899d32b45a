"""The state of a run as tensors: transfer to new members and comparison of replicas."""

"""The state of a run: its registry, its transfer to new members, and the comparison of replicas."""

"""Names, kinds, times and safe reads of raw Kubernetes objects."""

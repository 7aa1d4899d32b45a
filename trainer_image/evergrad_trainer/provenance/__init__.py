"""What a run was made with, kept beside its results."""

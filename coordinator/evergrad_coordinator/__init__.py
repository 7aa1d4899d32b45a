"""What operator and trainer must agree on. Standard library only; installed in both images."""

"""The commands for a cluster: one module for each command, and the steps that several commands share."""

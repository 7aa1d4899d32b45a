"""The commands for a cluster: one module a command, and the steps that several commands share."""

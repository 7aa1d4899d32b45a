"""The reconciliation of one run: observe, decide, plan, apply, write the status."""

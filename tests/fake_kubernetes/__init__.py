"""A small in-memory API server: resource versions, UIDs, generations, the status subresource, server-side
apply, label selectors and watches.

``store`` holds the objects, ``cluster`` is the client of the reconciler, ``server`` serves HTTP. Tests plan
the faults.
"""

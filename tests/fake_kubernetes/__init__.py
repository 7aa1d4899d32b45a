"""A small stand-in for an API server: versions, uids, generations, status apart, server-side apply, label
selectors, watches.

``store`` holds the objects, ``cluster`` is what reconciling talks to, ``server`` speaks HTTP. Faults are
planned by the test.
"""

"""The simulated cluster, importable by all tests of this room."""

import importlib.util
import sys
from pathlib import Path

# The suite imports tests by path, so that helpers must be put where an ordinary import finds them.
if "simulated_cluster" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "simulated_cluster", Path(__file__).with_name("simulated_cluster.py")
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules["simulated_cluster"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["simulated_cluster"])

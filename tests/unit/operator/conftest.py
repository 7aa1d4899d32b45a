"""The simulated run, importable by all tests of this room."""

import importlib.util
import sys
from pathlib import Path

# The suite imports tests by path, so that helpers must be put where an ordinary import finds them.
for _name in (
    "simulated_run",
    "run_samples",
    "pod_security",
    "status_schema",
    "webhook_samples",
):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(
            _name, Path(__file__).with_name(f"{_name}.py")
        )
        assert _spec is not None and _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])

"""Factories that several test folders share, and settings of Hypothesis."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# The time of an example depends on the load of the machine and not on the code. All other settings are the
# defaults, in CI too.
settings.register_profile(
    "any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

_PATH = Path(__file__).parents[1] / "synthetic_run.py"


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """tests/synthetic_run.py: step_record, RunWriter, Process."""
    spec = importlib.util.spec_from_file_location("synthetic_run", _PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic_run"] = module
    spec.loader.exec_module(module)
    return module

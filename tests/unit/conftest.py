"""Factories that several rooms share, and how examples are drawn."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, nothing about the code. All else stays as it is, in
# CI too.
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

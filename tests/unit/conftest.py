"""Factories that several rooms share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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

"""The end-to-end tests' watch over the operator detects every exit and every error that a test has not
declared."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
READY = (
    "2026-01-02 03:04:05,678 INFO evergrad_operator.edge.service: 0 runs, 0 pods found\n"
)
AWAY = (
    "2026-01-02 03:04:06,678 ERROR kopf.activities: Request attempt #1/9 failed; will retry: GET "
    "https://10.0.0.1/ -> x\n"
)
DEFECT = """\
2026-01-02 03:04:07,678 ERROR evergrad_operator.edge.reconcile.reconciler: default/run: a defect of the operator; please report it
Traceback (most recent call last):
  File "reconcile.py", line 1, in reconcile
KeyError: 'spec'
"""
CRASH = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nImportError: no x\n'


@pytest.fixture(scope="module")
def watching() -> Any:
    spec = importlib.util.spec_from_file_location(
        "operator_watch_under_test", ROOT / "tests/e2e/operator_watch.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Operator:
    """An operator with one pod, as its API server and kubelet show it."""

    def __init__(self) -> None:
        self.name, self.restarts, self.log, self.previous = "evergrad-a", 0, READY, ""

    def pods(self) -> list[dict[str, Any]]:
        return [
            {
                "metadata": {"name": self.name},
                "status": {"containerStatuses": [{"restartCount": self.restarts}]},
            }
        ]

    def log_of(self, pod: str, *, previous: bool = False) -> str:
        assert pod == self.name
        return self.previous if previous else self.log


def test_a_healthy_operator_shows_nothing(watching: Any) -> None:
    operator = Operator()
    watch = watching.OperatorWatch(operator)
    watch.look()
    operator.log += READY
    assert watch.look() == watching.Found([], [])


def test_a_restarted_container_is_detected_with_its_last_log_lines(
    watching: Any,
) -> None:
    operator = Operator()
    watch = watching.OperatorWatch(operator)
    watch.look()
    operator.restarts, operator.previous, operator.log = 1, READY + CRASH, READY
    found = watch.look()
    assert found.ended == ["evergrad-a: 1 restarts of the operator's container"]
    assert "ImportError: no x" in found.errors[0]
    assert found.without([], may_end=False) == [*found.ended, *found.errors]
    assert watch.look() == watching.Found([], []), "an end is reported once"


def test_a_replaced_pod_is_a_failure_unless_the_test_declares_it(watching: Any) -> None:
    operator = Operator()
    watch = watching.OperatorWatch(operator)
    watch.look()
    operator.name = "evergrad-b"
    found = watch.look()
    assert found.without([], may_end=False) == ["evergrad-a: the operator's pod is gone"]
    assert found.without([], may_end=True) == []


def test_only_errors_that_a_test_names_are_expected_and_each_is_matched_with_its_traceback(
    watching: Any,
) -> None:
    operator = Operator()
    watch = watching.OperatorWatch(operator)
    watch.look()
    operator.log += AWAY + DEFECT + READY
    found = watch.look()
    assert [error.splitlines()[-1] for error in found.errors] == [
        AWAY.strip(),
        "KeyError: 'spec'",
    ]
    assert found.without([watching.API_AWAY], may_end=True) == [DEFECT.strip()]
    assert found.without([], may_end=True) == [AWAY.strip(), DEFECT.strip()]


def test_errors_of_an_earlier_test_are_not_reported_again_and_a_rotated_log_is_read_completely(
    watching: Any,
) -> None:
    operator = Operator()
    watch = watching.OperatorWatch(operator)
    operator.log = READY * 9 + DEFECT
    assert len(watch.look().errors) == 1
    assert watch.look().errors == []
    operator.log = DEFECT
    assert len(watch.look().errors) == 1

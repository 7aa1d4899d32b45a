"""Checks the operator after every test: no container has restarted, and its log has no unexpected error.

A test that ends the operator on purpose is marked ``operator_ends``. A test that causes operator errors
lists them with ``operator_errors("pattern", ...)``: regular expressions that are searched in each log record.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

API_AWAY = r"Request attempt #\d+(/\d+)? failed"
"""kopf's error if the API server does not answer."""
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?P<level>[A-Z]+) ")
_TRACEBACK = "Traceback (most recent call last)"


class Watched(Protocol):
    """The interface of the operator under test."""

    def pods(self) -> list[dict[str, Any]]:
        """Return all pods of the operator."""

    def log_of(self, pod: str, *, previous: bool = False) -> str:
        """Return the log of a pod. ``previous``: the log before its container restarted."""


@dataclass(frozen=True)
class Found:
    """The restarts and errors of the operator since the last check."""

    ended: list[str]
    errors: list[str]

    def without(self, patterns: Iterable[str], *, may_end: bool) -> list[str]:
        """Return the findings that the test has not declared as expected."""
        patterns = list(patterns)
        errors = [
            error
            for error in self.errors
            if not any(re.search(pattern, error) for pattern in patterns)
        ]
        return [*(self.ended if not may_end else []), *errors]


@dataclass
class OperatorWatch:
    """Checks the operator after each test, and compares it with the previous check."""

    operator: Watched
    _restarts: dict[str, int] = field(
        default_factory=dict
    )  # Pod → number of restarts of its containers.
    _read: dict[str, int] = field(
        default_factory=dict
    )  # Pod → number of characters of its log that were checked.

    def look(self) -> Found:
        """Return all new findings."""
        pods = [pod for pod in self.operator.pods() if _is_there(pod)]
        restarts = {pod["metadata"]["name"]: count_restarts(pod) for pod in pods}

        # A missing or replaced pod means that the operator ended, like a restart.
        ended = [
            f"{name}: the operator's pod is gone"
            for name in self._restarts
            if name not in restarts
        ]
        texts = []
        for name, count in restarts.items():
            log, start = self.operator.log_of(name), self._read.get(name, 0)
            if count > self._restarts.get(name, 0):
                ended.append(
                    f"{name}: {count - self._restarts.get(name, 0)} restarts of the operator's container"
                )
                texts.append(self.operator.log_of(name, previous=True))
                start = 0
            # Kubelets start a new file when a log is long. Then the log is read from its beginning.
            texts.append(log[start if start <= len(log) else 0 :])
            self._read[name] = len(log)
        self._restarts = restarts
        return Found(ended, [error for text in texts for error in find_errors(text)])


def count_restarts(pod: dict[str, Any]) -> int:
    """Return the number of restarts of all containers of a pod."""
    return sum(
        int(one.get("restartCount", 0))
        for one in pod.get("status", {}).get("containerStatuses", [])
    )


def _is_there(pod: dict[str, Any]) -> bool:
    """Return whether a pod has not ended and is not being deleted."""
    return "deletionTimestamp" not in pod["metadata"] and pod.get("status", {}).get(
        "phase"
    ) not in (
        "Succeeded",
        "Failed",
    )


def find_errors(log: str) -> list[str]:
    """Return the log records that are errors or contain a traceback, each with all its lines."""
    return [
        text
        for level, text in _read_records(log)
        if level in ("ERROR", "CRITICAL") or _TRACEBACK in text
    ]


def _read_records(log: str) -> Iterator[tuple[str, str]]:
    level, lines = "", list[str]()
    for line in log.splitlines():
        if match := _RECORD.match(line):
            if lines:
                yield level, "\n".join(lines)
            level, lines = match["level"], []
        lines.append(line)
    if lines:
        yield level, "\n".join(lines)

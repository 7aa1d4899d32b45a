"""Moves the temporary files of all tests and their processes to one folder, and removes it at the end.

Many tests kill processes, and a killed process cannot remove its temporary files.
"""

import os
import shutil
import tempfile

import pytest

LONG_SECONDS = 3600
"""Default timeout of a test marked ``long``, in seconds. Other tests use pyproject.toml's timeout."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set a longer timeout for tests that take minutes."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


class _FailuresAtOnce:
    """Prints each failed test immediately, because the report comes only after the last test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write(f"\nFAILED {report.nodeid} ({report.when})\n")


def pytest_configure(config: pytest.Config) -> None:
    """Move TMPDIR.

    Workers of pytest-xdist share their controller's folder. ``tmp_path`` is not moved, so pytest keeps it for
    some sessions.
    """
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_FailuresAtOnce(config))
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="evergrad-tests-")
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))

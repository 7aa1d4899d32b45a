"""For all tests: one folder for what they and their processes put into the temporary one, gone in the end.

A process that is killed cannot remove what it has made there, and many tests kill processes.
"""

import os
import shutil
import tempfile

import pytest

LONG_SECONDS = 3600
"""Longest time of a test marked ``long`` that names none itself; the one of pyproject.toml is for the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that take minutes a timeout of their own."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


class _FailuresAtOnce:
    """Names each failed test when it fails: the report comes after the last test, half an hour later."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write(f"\nFAILED {report.nodeid} ({report.when})\n")


def pytest_configure(config: pytest.Config) -> None:
    """Move TMPDIR.

    Workers of pytest-xdist have their controller's; ``tmp_path`` stays where pytest keeps it for a while.
    """
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_FailuresAtOnce(config))
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="evergrad-tests-")
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))

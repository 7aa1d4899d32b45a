"""How long a test waits for an event that does not come.

The limit detects hangs and never measures speed. A machine that is ten times slower than a developer's
must still pass, so no test has a shorter limit of its own. It is less than the test's own timeout
(`timeout` in pyproject.toml), so that a wait can report what it waited for.
"""

from typing import Final

PATIENCE: Final = 600.0
"""Seconds."""

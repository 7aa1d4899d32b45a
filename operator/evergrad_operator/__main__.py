"""``python -m evergrad_operator``: settings → client → kopf."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Final

from evergrad_operator.core.objects.errors import SettingsError
from evergrad_operator.edge.logs import set_up_logging
from evergrad_operator.edge.service import run_operator
from evergrad_operator.edge.settings import parse_settings

EXIT_SETTINGS = 64
DEEPEST: Final = 40_000
"""Recursion limit. An API server keeps objects of 10,000 levels, each of which costs Python's JSON one call
and a copy two. With a lower limit, kopf and our client could not read any list that holds such an object."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until asked to stop, and return the exit code.

    0: it was asked to stop; 1: it is to be started again; 64: settings or surroundings are wrong.
    """
    sys.setrecursionlimit(DEEPEST)
    settings = parse_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    try:
        return asyncio.run(run_operator(settings, os.environ))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_SETTINGS


if __name__ == "__main__":
    sys.exit(main())

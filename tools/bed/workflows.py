"""Checks the workflows for GitHub with actionlint: their keys, expressions, events and references to actions.

python -m bed.workflows     a part of `make github-lint`
"""

import os
import shutil
import subprocess
import sys

from bed import toolbox
from bed.places import REPOSITORY
from bed.shell import BedError


def main() -> int:
    """Return 0 if they are valid, or if a developer's machine cannot build actionlint; return 1 with the
    findings."""
    is_buildable = shutil.which("go") is not None or not toolbox.missing(("actionlint",))
    if not is_buildable and os.environ.get("CI") != "true":
        print("actionlint: left out. It is built with Go, which is not installed.")
        return 0
    files = sorted((REPOSITORY / ".github/workflows").glob("*.y*ml"))
    try:
        # Disable the two programs that actionlint would call if they were installed, so that the findings are
        # the same on every machine.
        program = toolbox.binary("actionlint")
        command = [str(program), "-shellcheck=", "-pyflakes=", *map(str, files)]
    except BedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    code = subprocess.call(command, cwd=REPOSITORY)
    if code == 0:
        print(f"actionlint: {len(files)} workflows are sound")
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

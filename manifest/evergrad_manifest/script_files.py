"""Checks the files that a script run needs on this machine: its program and its working directory.

Only reads, and writes nothing.
"""

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from evergrad_manifest.envelope.script import Script, program_path, working_directory_of
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.reading.loader import path_label

_COMMAND: Final = "spec.script.command"
_NAMED: Final = f"{_COMMAND} names it"
_RELATIVE: Final = "Check the path; it is relative to the manifest's directory"


def script_problems(script: Script, *, base_directory: Path) -> list[Problem]:
    """Return problems that keep the script from starting here: its file, executable or working directory is
    missing or cannot be used."""
    program, path = script.program, program_path(script.program, base_directory)
    problems: list[Problem] = []
    if path is not None:
        problems = _file_problems(path)
        # Python reads a file. The system starts any other program itself.
        if not problems and program.kind != "file" and not os.access(path, os.X_OK):
            problems = [_denied(path, "executed")]
    elif program.kind == "executable":
        # Look it up as the worker will: with the script's own PATH, if it sets one.
        search_path = script.env.get("PATH")
        if shutil.which(program.name, path=search_path) is None:
            where = "spec.script.env.PATH" if search_path is not None else "PATH"
            what = f"the executable {program.name!r} was not found"
            why = f"a name without a slash is looked up in {where}"
            remedy = f"Install it, or write ./{program.name}"
            problems = [Problem(f"{_COMMAND}[0]", what, why, remedy)]

    # Check the folder even after a problem of the program. Entering it requires another permission than
    # reading it.
    folder = working_directory_of(script, base_directory)
    named, mode = "spec.script.workingDirectory names it", _mode_of(folder)
    if isinstance(mode, str):
        problems.append(Problem(path_label(folder), mode, named, _RELATIVE))
    elif not stat.S_ISDIR(mode):
        remedy = "Name the folder that the script starts in"
        problems.append(Problem(path_label(folder), "is not a directory", named, remedy))
    elif not os.access(folder, os.X_OK):
        remedy = "Change its permissions"
        problems.append(Problem(path_label(folder), "cannot be entered", named, remedy))

    # On a cluster, these variables come from objects of the cluster, none of which is on this machine.
    for name, source in script.value_from.items():
        is_optional = any(one.get("optional") for one in source.values())
        if name not in os.environ and not is_optional:
            where = format_path(("spec", "script", "valueFrom", name))
            what = f"{name} is not set on this machine"
            why = "its value comes from an object of the cluster, and this run does not start there"
            remedy = f"Set it in the shell: {name}=… evergrad run"
            problems.append(Problem(where, what, why, remedy))
    return problems


def portable_problems(script: Script, *, base_directory: Path) -> list[Problem]:
    """Return problems that the script has on every machine: a Python file that should be next to the
    manifest.

    An absolute path may be a path in a pod.
    """
    # A module or an executable may be in the image even if it is not on this machine.
    program = script.program
    if program.kind != "file" or Path(program.name).is_absolute():
        return []
    return _file_problems(base_directory / program.name)


def is_module_found(script: Script, *, base_directory: Path) -> bool:
    """Return whether this interpreter finds the script's module. Imports nothing.

    Modules that only import hooks would find are not found.
    """
    # Search the same places as a worker's interpreter, in its order.
    program, folder = script.program, working_directory_of(script, base_directory)
    from_env = [
        str(folder / entry)
        for entry in script.env.get("PYTHONPATH", "").split(os.pathsep)
        if entry
    ]
    places: Sequence[str] = (str(folder), *from_env, *sys.path)

    # Search package by package, only by file names: an import would run the package's code in this process.
    parts = program.name.split(".")
    for end in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:end]), places)
        if found is None:
            return False
        places = tuple(found.submodule_search_locations or ())
    return True


def _file_problems(path: Path) -> list[Problem]:
    mode = _mode_of(path)
    if isinstance(mode, str):
        return [Problem(path_label(path), mode, _NAMED, _RELATIVE)]
    if stat.S_ISDIR(mode):
        return [
            Problem(
                path_label(path),
                "is a directory",
                _NAMED,
                "Name the file in it, or use -m and the module's name",
            )
        ]
    return [] if os.access(path, os.R_OK) else [_denied(path, "read")]


def _mode_of(path: Path) -> int | str:
    """Return the mode of the file at ``path``, or the reason why it cannot be used."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or 'it is not a path'}"


def _denied(path: Path, verb: str) -> Problem:
    return Problem(
        path_label(path),
        f"cannot be {verb}",
        f"permission is denied ({_NAMED})",
        "Change its permissions",
    )

"""A worker of ``spec.script``: runs a Python file or module in a warm process, or executes a program."""

import ast
import atexit
import contextlib
import importlib
import importlib.util
import logging
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path

from evergrad_common.codec import MAX_TEXT
from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_manifest.envelope.script import (
    Script,
    program_path,
    worker_command,
    working_directory_of,
)
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.host_errors import kind_of_script_error
from evergrad_trainer.distributed.process_groups import read_launch
from evergrad_trainer.worker.channel import Channel, Failed, fit_text
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.worker.peer_failures import is_peer_error

_log = logging.getLogger(__name__)
_WORTH_PRELOADING = (
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "datasets",
    "torchvision",
    "lightning",
)
_LAST_FRAMES = 12


def preload(script: Script, base_directory: Path) -> tuple[str, ...]:
    """Import the libraries that the script imports, so that forked workers start warm; return their names.

    Only well-known libraries are imported: importing the user's own modules outside the worker could have any
    side effect.
    """
    path = (
        program_path(script.program, base_directory)
        if script.program.kind == "file"
        else None
    )
    names = _names_from(path) if path is not None else {}
    wanted = {"torch", *names}
    loaded = []
    # Use this order instead of the script's order: torch first, because all others import it.
    for name in _WORTH_PRELOADING:
        if name in wanted and importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
            loaded.append(name)
    if "accelerate" in loaded or "transformers" in loaded:
        # transformers loads each class on first use. Load the classes that every training script uses, and
        # the classes that this script imports.
        with contextlib.suppress(Exception):
            from transformers import (  # noqa: F401
                AutoModelForCausalLM,
                Trainer,
                TrainingArguments,
            )
        for name in sorted(names.get("transformers", ())):
            # An unknown name is an error of the script, which its worker reports.
            with contextlib.suppress(Exception):
                getattr(sys.modules.get("transformers"), name)
    return tuple(loaded)


def run_script(
    channel: Channel,
    heartbeat: WorkerHeartbeat,
    *,
    script: Script,
    base_directory: Path,
    is_warm: bool,
) -> int:
    """Run one worker of a script, and return its exit code.

    ``is_warm``: run Python in this process instead of a new one.
    """
    # Behave like a process that a shell has started: SIGTERM ends a script without handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # Read this before the script can change the variables.
    world_size = read_launch().world_size
    os.environ.update(script.env)
    # A script may import the files next to it, whatever environment this process was started with.
    os.environ.pop("PYTHONSAFEPATH", None)
    os.chdir(working_directory_of(script, base_directory))
    program = script.program
    # From here on this process runs the script; of the node, only the channel is active.
    if program.kind == "executable" or not is_warm:
        command = worker_command(
            script, base_directory=base_directory, python=sys.executable
        )
        os.execvp(command[0], command)
    # Keep process groups alive, because this process skips the interpreter's shutdown: see ``keep_groups``.
    torch_private.keep_groups()
    _forget_exit_handlers()
    try:
        return _run_here(channel, script, base_directory, world_size=world_size)
    finally:
        _end_as_python()


def _run_here(
    channel: Channel, script: Script, base_directory: Path, *, world_size: int
) -> int:
    """Run the program in this process, and return its exit code."""
    program = script.program
    try:
        if program.kind == "module":
            sys.path.insert(0, os.getcwd())
            sys.argv = [program.name, *program.arguments]
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            path = str(program_path(program, base_directory))
            sys.path.insert(0, str(Path(path).resolve().parent))
            sys.argv = [path, *program.arguments]
            runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        # Follow Python's rule: None means success; a text is printed and means failure.
        if stop.code is None:
            return int(ExitCode.DONE)
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the user's own error: reported, printed, and an exit code
        traceback.print_exc()
        # Send the node the error's kind and its last frames.
        text = "".join(traceback.format_exception(error)[-_LAST_FRAMES:])[-MAX_TEXT:]
        said = fit_text(f"{error}\n{text}")
        kind = kind_of_script_error(error)
        if kind is ErrorKind.INTERNAL and is_peer_error(error, world_size=world_size):
            kind = ErrorKind.PEER
        name = type(error).__name__
        channel.send(
            Failed(-1, -1, 1, name, said, is_final=False, is_agreed=False, kind=kind)
        )
        return 1
    return int(ExitCode.DONE)


def _forget_exit_handlers() -> None:
    """Remove the exit handlers of the process that this process was forked from, such as the removal of its
    temporary folders. Handlers that the script adds later are kept."""
    atexit._clear()
    # Finalizers of the original process. atexit no longer calls them, and the script's own finalizers
    # register again.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _end_as_python() -> None:
    """Do what Python does at the end of a program before it frees objects: wait for threads that are not
    daemons, and call exit handlers. Errors are printed and do not change the exit code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - as Python itself: an error of a handler ends nothing
        traceback.print_exc()


def can_fork() -> str | None:
    """Return why workers must not be forked from this process, or None if they may be."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return "this process has touched an accelerator"
    return None


def _names_from(path: Path) -> dict[str, set[str]]:
    """Return the top-level packages that a Python file imports, each with the names that are imported from
    it.

    Returns nothing if the file cannot be read or parsed: its worker reports the error.
    """
    names: dict[str, set[str]] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names.setdefault(alias.name.partition(".")[0], set())
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                package, _, part = node.module.partition(".")
                taken = names.setdefault(package, set())
                if not part:
                    taken |= {alias.name for alias in node.names}
    return names

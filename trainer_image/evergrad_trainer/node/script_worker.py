"""A worker of ``spec.script``: runs a Python file or module in a warm process, or become an
executable."""

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
    """Import here, once, what the script will import first, so that forked workers start warm; what was
    imported.

    Only well-known libraries: importing the user's own modules in another process than the worker could do
    anything.
    """
    path = (
        program_path(script.program, base_directory)
        if script.program.kind == "file"
        else None
    )
    names = _names_from(path) if path is not None else {}
    wanted = {"torch", *names}
    loaded = []
    # In this order, and not the script's: torch first, which all others import.
    for name in _WORTH_PRELOADING:
        if name in wanted and importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
            loaded.append(name)
    if "accelerate" in loaded or "transformers" in loaded:
        # transformers loads each class on first use: here those that every training script uses, and its own.
        with contextlib.suppress(Exception):
            from transformers import (  # noqa: F401
                AutoModelForCausalLM,
                Trainer,
                TrainingArguments,
            )
        for name in sorted(names.get("transformers", ())):
            # An error of a name is the script's, whose worker meets it again.
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
    """Be one worker of a script; returns its exit code.

    ``is_warm``: run Python in this process instead of a new one.
    """
    # As in a process that a shell has started: a script without handlers ends by the first SIGTERM, at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # Before the script can change the variables.
    world_size = read_launch().world_size
    os.environ.update(script.env)
    # A script may import the files next to it, whatever this process was started with.
    os.environ.pop("PYTHONSAFEPATH", None)
    os.chdir(working_directory_of(script, base_directory))
    program = script.program
    # From here on this process is the script: nothing of the node runs in it but the channel.
    if program.kind == "executable" or not is_warm:
        command = worker_command(
            script, base_directory=base_directory, python=sys.executable
        )
        os.execvp(command[0], command)
    # This process ends without the interpreter's own end, which would free them: see there.
    torch_private.keep_groups()
    _forget_exit_handlers()
    try:
        return _run_here(channel, script, base_directory, world_size=world_size)
    finally:
        _end_as_python()


def _run_here(
    channel: Channel, script: Script, base_directory: Path, *, world_size: int
) -> int:
    """Run the program in this process; returns its exit code."""
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
        # As Python itself ends: None is success, and a text is printed and a failure.
        if stop.code is None:
            return int(ExitCode.DONE)
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the user's own error: told to the supervisor, printed, and an exit code
        traceback.print_exc()
        # The node gets the error's kind and its last frames.
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
    """Drop what the process that this one was forked from would do at its own exit, such as removing its
    temporary folders; what the script adds is its own."""
    atexit._clear()
    # Finalizers of that process: atexit no longer calls them, and the script's own register again.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _end_as_python() -> None:
    """What Python does at the end of a program, before it frees anything: waits for threads that are no
    daemons, and calls exit handlers. Errors are printed, and change no exit code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - as Python itself: an error of a handler ends nothing
        traceback.print_exc()


def can_fork() -> str | None:
    """Why workers must not be forked from this process; None if they may."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return "this process has touched an accelerator"
    return None


def _names_from(path: Path) -> dict[str, set[str]]:
    """Top-level packages a Python file imports, each with the names it takes from it.

    Nothing for a file that cannot be read or parsed: its worker will say so.
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

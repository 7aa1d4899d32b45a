"""Runs several nodes on this machine: one coordinator and N supervisors as local processes, which are
replaced if they are lost."""

import contextlib
import gc
import http.client
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from evergrad_common.contract import ExitCode, RunFile
from evergrad_common.secret import obtain_token
from evergrad_coordinator.edge.stacks import register_stacks
from evergrad_coordinator.rules.status import ENDED_PHASES
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.worker.processes import (
    die_with_parent,
    run_and_exit,
    stop_signals_blocked,
    unblock_stop_signals,
)
from evergrad_trainer.worker.signals import StopCount, describe_abrupt_end

_START_SECONDS = 20.0
_END_SECONDS = 10.0
"""Time after the run's end in which its nodes learn about it and the coordinator ends."""
_REPLACE_SECONDS = 1.0
"""Pause before a lost node is started again; a cluster takes about as long."""
_ASK_SECONDS = 0.1
"""Interval between status requests to a coordinator whose nodes have all ended."""
_FAILED = (ExitCode.USER_ERROR, ExitCode.INTERNAL)
"""Exit codes of a node that has failed and is not started again."""
_FINAL = (
    ExitCode.DONE,
    ExitCode.USER_ERROR,
    ExitCode.INTERNAL,
    ExitCode.STOPPED_SAVED,
    ExitCode.STOPPED_UNSAVED,
)


class _LeaveAtOnce(BaseException):
    """Raised by the handler of a second signal, at any point of the launcher. It is not an Exception, so that
    no ``except Exception`` catches it."""


class CoordinatorFailedError(EvergradError):
    """The coordinator did not start."""

    code = "internal.coordinator"


@dataclass(frozen=True)
class CoordinatorSettings:
    """Arguments of a local coordinator.

    ``state``: file of its generation, which is also the lock of the run. ``address``: file that contains its
    ports while it runs.
    """

    run: str
    min_nodes: int
    max_nodes: int
    expect: int
    recovery: str
    state: Path
    first_generation: int
    log: Path
    address: Path
    max_failures: int = 3
    extra: tuple[str, ...] = ()


class LocalCoordinator:
    """The coordinator's process. If it is lost, it is started again at the same port, and nodes reconnect to
    it."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="evergrad-")
        self._file = Path(self._folder.name) / "address.json"
        self.token_file = Path(self._folder.name) / "token"
        """Readable only by its owner; a token in the arguments would be visible to every user of the
        machine."""
        self.token = obtain_token(self.token_file)
        self.port = 0
        self.status_port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        """Return the directory of the run's checkpoints."""
        return self._settings.address.parent / RunFile.CHECKPOINTS

    def start(self) -> None:
        """Start the process and wait until it listens. Raises CoordinatorFailedError with the last lines of
        its log."""
        settings = self._settings
        self._file.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "evergrad_coordinator", "--run", settings.run,
            "--min", str(settings.min_nodes), "--max", str(settings.max_nodes),
            "--expect", str(settings.expect),
            "--host", "127.0.0.1", "--port", str(self.port), "--status-port", str(self.status_port),
            "--token-file", str(self.token_file),
            "--recovery", settings.recovery, "--state", str(settings.state),
            "--first-generation", str(settings.first_generation),
            "--max-failures", str(settings.max_failures), "--address-file", str(self._file),
            "--linger", "0.2", "--exit-when-empty", *settings.extra,
        ]  # fmt: skip
        if self.process is None:
            # This is the first coordinator of the run, so no group exists from before.
            command.append("--nothing-runs")

        # The process dies with the launcher: a coordinator that is left behind would hold the run's lock.
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with settings.log.open("ab") as log:
            # Start a new session, so that Ctrl-C reaches only the launcher.
            self.process = subprocess.Popen(
                command,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - no other thread of the launcher holds a lock
            )

        # The file is created atomically when the coordinator listens.
        deadline = time.monotonic() + _START_SECONDS
        while not self._file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = settings.log.read_text("utf-8", errors="replace").splitlines()[-3:]
                raise CoordinatorFailedError(
                    f"the coordinator did not start: {' '.join(tail)}. See {settings.log}"
                )
            time.sleep(0.01)
        text = self._file.read_text("utf-8")
        address = json.loads(text)
        self.port, self.status_port = int(address["port"]), int(address["statusPort"])
        # `evergrad open` reads this. Write it only now, because this coordinator holds the lock of the run.
        settings.address.write_text(text, "utf-8")

    def poll(self) -> int | None:
        """Return None while the process runs, a negative number if it was killed, or the exit code of the
        run."""
        return None if self.process is None else self.process.poll()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait until the process ends after the run's outcome; return its exit code, or None if it does not
        end.

        If no node is connected and the run has no outcome, none can follow, so the wait ends immediately.
        """
        deadline = time.monotonic() + timeout_seconds
        while (code := self.poll()) is None and time.monotonic() < deadline:
            if self.process is None:
                return None
            # A coordinator that does not respond is ending or busy, so wait for the end of its process.
            status = self.fetch_status()
            if (
                status is not None
                and not status["nodes"]["connected"]
                and status["phase"] not in ENDED_PHASES
            ):
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ASK_SECONDS)
        return code

    def fetch_status(self) -> dict[str, Any] | None:
        """Return the coordinator's /status, or None if it does not respond."""
        return fetch_status(self.status_port, self.token)

    def stop(self) -> None:
        """Kill the process if it still runs, and reap it."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.stop()
        if self.port:
            self._settings.address.unlink(missing_ok=True)
        self._folder.cleanup()


def fetch_status(port: int, token: str) -> dict[str, Any] | None:
    """Return the status of a coordinator on this machine, or None if it does not respond."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
        status: dict[str, Any] = json.loads(connection.getresponse().read())
        return status
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


@dataclass
class _Node:
    index: int
    process: BaseProcess
    lost_at: float | None = None


@dataclass
class LocalNodes:
    """N supervisors. ``main(index)`` runs in a node's process and returns its exit code."""

    main: Callable[[int], int]
    num_nodes: int
    grace_seconds: float = 25.0
    """Seconds from a request to stop until nodes leave by themselves."""
    is_replacing: bool = True
    nodes: dict[int, _Node] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    starts: Counter[int] = field(default_factory=Counter)
    """Number of starts of each node. In a node's process it includes the current start."""

    def start(self) -> None:
        for index in range(self.num_nodes):
            self.start_node(index)

    def start_node(self, index: int) -> None:
        """Start, or restart, the node with this index by forking this warm process."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.starts[index] += 1
        parent = os.getpid()

        def live() -> int:
            try:
                return self.main(index)
            except EvergradError as error:
                print(f"error: node {index}: {error}", file=sys.stderr)
                return int(error.exit_code)

        def be_node() -> None:
            die_with_parent(parent)
            register_stacks(f"node {index}")
            # Leave the terminal's foreground process group, so that Ctrl-C reaches only the launcher.
            os.setpgid(0, 0)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # A signal that arrived earlier ends the node here, because the launcher requests each node only
            # once.
            unblock_stop_signals()
            run_and_exit(live)

        process = multiprocessing.get_context("fork").Process(
            target=be_node, name=f"evergrad-node-{index}"
        )
        with stop_signals_blocked():
            process.start()
        self.ended.pop(index, None)
        self.nodes[index] = _Node(index, process)

    def poll(self) -> None:
        """Record nodes that have ended, and replace nodes that were lost more than 1 s ago."""
        now = time.monotonic()
        for node in list(self.nodes.values()):
            code = node.process.exitcode
            if code is None:
                continue
            # Do not replace a node in the same call: the other nodes must notice that it is gone.
            if node.lost_at is None:
                node.process.join()
                node.lost_at = now
                if code in _FINAL:
                    self.ended[node.index] = code
                    self._report_end(node.index, code)
            elif (
                self.is_replacing
                and node.index not in self.ended
                and now - node.lost_at > _REPLACE_SECONDS
            ):
                self.start_node(node.index)

    def _report_end(self, index: int, code: int) -> None:
        """Print a warning if a node has failed permanently while others still train."""
        left = [node for node in self.nodes.values() if node.lost_at is None]
        if code in _FAILED and left:
            print(
                f"warning: node {index} ended with exit code {code} and is not replaced: the run continues "
                f"with {len(left)} of {self.num_nodes} nodes, as spec.nodes.min allows",
                file=sys.stderr,
                flush=True,
            )

    def describe_missing(self) -> str:
        """Name the nodes that failed permanently in a run that other nodes completed, or return an empty
        text."""
        failed = sorted(index for index, code in self.ended.items() if code in _FAILED)
        if not failed or len(failed) == self.num_nodes:
            return ""
        names = ", ".join(
            f"node {index} (exit code {self.ended[index]})" for index in failed
        )
        return (
            f"warning: the run ended without {names}: {self.num_nodes - len(failed)} of {self.num_nodes} "
            "nodes trained to its end. The reason is in the messages above and in the run's logs folder"
        )

    @property
    def are_over(self) -> bool:
        """Whether no node runs and none will be replaced."""
        if any(node.lost_at is None for node in self.nodes.values()):
            return False
        return not self.is_replacing or set(self.nodes) <= set(self.ended)

    def signal(self, number: int) -> None:
        for node in self.nodes.values():
            if node.process.exitcode is None and node.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(node.process.pid, number)

    def close(self) -> None:
        """Kill all nodes that still run. Their workers die with them."""
        self.signal(signal.SIGKILL)
        for node in self.nodes.values():
            node.process.join()


class _Stops:
    """The launcher's SIGTERM and SIGINT handlers. The first signal is recorded, and the second interrupts the
    launcher at any point."""

    def __init__(self) -> None:
        self.count = StopCount()
        self.is_told = False
        self._is_armed = True
        self._previous = {
            number: signal.signal(number, self._take)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def disarm(self) -> None:
        """Stop interrupting, because the launcher is ending the remaining processes."""
        self._is_armed = False

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.count.note(number, now=time.monotonic()) == "second" and self._is_armed:
            self._is_armed = False
            raise _LeaveAtOnce


def run_local(
    coordinator: LocalCoordinator,
    nodes: LocalNodes,
    *,
    on_tick: Callable[[], None] = lambda: None,
) -> int:
    """Run a coordinator and its nodes until the run ends, and return the run's exit code.

    SIGINT or SIGTERM requests all nodes to leave, which takes at most their grace period; a second signal
    kills them. ``on_tick`` is called about 20 times per second; evergrad_chaos disturbs the run in it.
    """
    stops = _Stops()
    # Forked nodes share this process's memory, so the garbage collector must not write to its pages.
    gc.freeze()
    gc.enable()
    try:
        coordinator.start()
        print(
            f"page http://127.0.0.1:{coordinator.status_port}/\n"
            f"coordinator 127.0.0.1:{coordinator.port}, state "
            f"http://127.0.0.1:{coordinator.status_port}/status; "
            f"another node: evergrad node FILE --join 127.0.0.1:{coordinator.port} --token-file "
            f"{coordinator.token_file}",
            flush=True,
        )
        nodes.start()
        if not _follow(coordinator, nodes, stops, on_tick):
            print(
                "the nodes do not leave: ended, state since the last checkpoint is not saved",
                file=sys.stderr,
            )
            return int(ExitCode.STOPPED_UNSAVED)
        code = coordinator.wait(_END_SECONDS)
        if missing := nodes.describe_missing():
            print(missing, file=sys.stderr, flush=True)
        return combine_node_codes(nodes.ended) if code is None or code < 0 else code
    except _LeaveAtOnce:
        print(describe_abrupt_end(coordinator.checkpoints), file=sys.stderr)
        return int(ExitCode.STOPPED_UNSAVED)
    finally:
        # Do not interrupt from here on: processes would be left behind.
        stops.disarm()
        nodes.close()
        coordinator.close()
        stops.restore()


def _follow(
    coordinator: LocalCoordinator,
    nodes: LocalNodes,
    stops: _Stops,
    on_tick: Callable[[], None],
) -> bool:
    """Watch the coordinator and the nodes until no node is left, or until 10 s after the run's end.

    Returns False if nodes do not leave although they were requested to.
    """
    # After the run's end, wait 10 s for the nodes to learn about it, but not longer for a frozen node.
    over_at: float | None = None
    while not nodes.are_over and (
        over_at is None or time.monotonic() - over_at < _END_SECONDS
    ):
        sentinels = [
            node.process.sentinel
            for node in nodes.nodes.values()
            if node.process.exitcode is None
        ]
        multiprocessing.connection.wait(sentinels, timeout=0.05)
        nodes.poll()
        code = coordinator.poll()
        if code is not None and code >= 0:
            # The remaining nodes have not been notified yet, or were just lost; replace none of them.
            nodes.is_replacing = False
            over_at = over_at or time.monotonic()
        elif stops.count.first_at is None:
            # The coordinator was killed. Restart it at the same port, where the nodes reconnect by
            # themselves.
            if code is not None:
                coordinator.start()
            on_tick()
        elif not stops.is_told:
            stops.is_told = True
            nodes.is_replacing = False
            nodes.signal(signal.SIGTERM)
        elif time.monotonic() - stops.count.first_at > nodes.grace_seconds + _END_SECONDS:
            # A node ends by itself some seconds earlier unless it is frozen.
            return False
    return True


def combine_node_codes(ended: dict[int, int]) -> int:
    """Return the run's exit code if the coordinator can no longer provide it."""
    codes = set(ended.values())
    for code in (
        ExitCode.USER_ERROR,
        ExitCode.DONE,
        ExitCode.INTERNAL,
        ExitCode.STOPPED_UNSAVED,
        ExitCode.STOPPED_SAVED,
    ):
        if code in codes:
            return int(code)
    return int(ExitCode.INTERNAL)

"""torchrun's rendezvous backend ``evergrad``: torch's elastic agent as a node of the run's coordinator.

    torchrun --nnodes=1:8 --rdzv-backend=evergrad --rdzv-endpoint=HOST:PORT --rdzv-id=RUN
    --max-restarts=1000000 script.py

Every process that imports torch's rendezvous package loads this module during that import, also workers.
Therefore this module imports only names of the package's api module, and the handler imports the modules that
only an agent needs.
"""

import atexit
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from evergrad_trainer.torchrun.agent_link import AgentLink
    from evergrad_trainer.torchrun.agent_state import AgentSettings

BACKEND = "evergrad"
_DEFAULT_LEASE_SECONDS = 10.0
_NODE_VARIABLES = ("EVERGRAD_NODE", "JOB_COMPLETION_INDEX")
_OWN_KEYS = ("join_timeout", "lease", "node", "token_file")
_TORCH_KEYS = ("timeout",)
"""Keys that torchrun's launcher adds to the configuration."""
_JOIN_SECONDS = 900.0
"""Default ``timeout`` of torchrun's launcher."""
_WAIT_SECONDS = 1.0


def entry_point() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator of handlers. The distribution's metadata names this function."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of this agent. If arguments are invalid, prints all problems and raises
    SystemExit(64)."""
    from evergrad_common.contract import ExitCode

    try:
        settings = parse_settings(parameters, dict(os.environ))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(int(ExitCode.USER_ERROR)) from None
    return EvergradRendezvousHandler(settings)


def parse_settings(
    parameters: RendezvousParameters, environment: dict[str, str]
) -> "AgentSettings":
    """Parse torchrun's arguments and the variables of Evergrad.

    Raises ValueError if any are invalid, with one line for each problem.
    """
    from importlib.metadata import version

    from evergrad_common.addresses import split_address
    from evergrad_trainer.torchrun.agent_state import AgentSettings

    given = {str(key): value for key, value in parameters.config.items()}
    problems = [
        f"--rdzv-conf {key}: no such key. The keys are {', '.join(_OWN_KEYS)}."
        for key in sorted(set(given) - {*_OWN_KEYS, *_TORCH_KEYS})
    ]
    coordinator = split_address(parameters.endpoint)
    if coordinator is None:
        problems.append(
            f"--rdzv-endpoint {parameters.endpoint!r}: not HOST:PORT. Name the coordinator's host and port."
        )
    if not parameters.run_id or parameters.run_id == "none":
        problems.append(
            "--rdzv-id: missing. Give the run's name, the same as the coordinator's --run."
        )
    # Read the node's index and the token file from the arguments, or else from the environment.
    places = (given.get("node"), *map(environment.get, _NODE_VARIABLES))
    node = str(next((place for place in places if place), ""))
    if not node:
        problems.append(
            "--rdzv-conf node: missing. Give this node's index: node=0, or EVERGRAD_NODE=0 in "
            "the environment."
        )
    token_file = str(
        given.get("token_file") or environment.get("EVERGRAD_TOKEN_FILE") or ""
    )
    if not token_file:
        problems.append(
            "--rdzv-conf token_file: missing. Give the coordinator's --token-file, or EVERGRAD_TOKEN_FILE."
        )
    elif not os.access(token_file, os.R_OK):
        problems.append(f"--rdzv-conf token_file: {token_file} cannot be read.")
    lease_seconds = _find_seconds(given, "lease", _DEFAULT_LEASE_SECONDS, problems)
    join_key = "join_timeout" if "join_timeout" in given else "timeout"
    join_seconds = _find_seconds(given, join_key, _JOIN_SECONDS, problems)
    if problems:
        raise ValueError("\n".join(problems))
    host, port = coordinator or ("", 0)
    return AgentSettings(
        run=parameters.run_id,
        node=node,
        host=host,
        port=port,
        address=parameters.local_addr,
        token_file=Path(token_file),
        lease_seconds=lease_seconds,
        join_seconds=join_seconds,
        fingerprint={"torch": version("torch")},
    )


def _find_seconds(
    given: Mapping[str, object], key: str, default: float, problems: list[str]
) -> float:
    """Return the seconds of ``key``, or the default if it is missing or invalid. Adds a problem if it is
    invalid."""
    with contextlib.suppress(ValueError):
        number = float(str(given.get(key, default)))
        if 0 < number < math.inf:
            return number
    problems.append(
        f"--rdzv-conf {key}: {given[key]!r} is no number of seconds above zero."
    )
    return default


class EvergradRendezvousHandler(RendezvousHandler):
    """The rendezvous handler of an agent, used for its whole life.

    The coordinator decides which nodes are in a group and how the run ends.
    """

    def __init__(self, settings: "AgentSettings") -> None:
        from evergrad_trainer.torchrun.agent_link import AgentLink

        self._settings = settings
        self._process = os.getpid()
        self._is_closed = False
        self._directory = Path(tempfile.mkdtemp(prefix="evergrad-"))
        self._store: TCPStore | None = None
        self._link: AgentLink = AgentLink(settings, directory=self._directory)
        # All nodes start the same number of workers, so agents do not need a store to exchange ranks.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        os.environ.update(self._link.loop.node_state.environment)
        self._link.loop.start()
        if threading.current_thread() is threading.main_thread():
            # C's signal handler writes to the pipe, so that the coordinator learns of the stop before the
            # agent's teardown begins.
            signal.set_wakeup_fd(
                self._link.loop.wakeup.write_end, warn_on_full_buffer=False
            )
        os.register_at_fork(after_in_child=self._forget_in_child)
        # An agent that ends by a signal does not call shutdown.
        atexit.register(self._depart)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers connect to the store that rank 0's agent opened before it reported ready."""
        return True

    def get_run_id(self) -> str:
        return self._settings.run

    def is_closed(self) -> bool:
        return self._link.state.end is not None

    def set_closed(self) -> None:
        """Does nothing, because only the coordinator ends a run."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be stopped for any reason. torch then restarts them without counting
        the restart."""
        return int(self._link.should_restart_workers())

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node has its place in a new group. Called after the old workers have exited.

        Raises SystemExit with the coordinator's exit code if the run has ended or the coordinator refuses
        this node. Raises RendezvousTimeoutError if the coordinator has not answered for the join timeout. A
        spare node that is in contact with the coordinator waits without a limit.
        """
        link, state = self._link, self._link.state
        # Close the store of the old group, so that late members of that group cannot use it.
        self._store = None
        link.leave_group()
        silence = _Silence(self._settings, now=time.monotonic())
        with state.changed:
            answered = 0
            while True:
                if state.end is not None:
                    raise SystemExit(state.end.exit_code)
                if (
                    state.go is not None
                    and state.go.generation >= state.newest
                    and self._store is not None
                ):
                    go = state.go
                    break
                if state.plan is not None and state.plan.generation > answered:
                    # Open a new store for each plan, so that members of older plans cannot reach it.
                    answered = state.plan.generation
                    port = 0
                    if state.plan.is_member:
                        address = self._settings.find_address()
                        self._store = TCPStore(
                            address, 0, is_master=True, wait_for_workers=False
                        )
                        port = self._store.port
                    else:
                        self._store = None
                    link.answer(state.plan, port=port)
                    continue
                # Wait for a limited time, so that the silence of the coordinator is also checked.
                state.changed.wait(_WAIT_SECONDS)
                silence.check(link.loop.seconds_since_contact(), now=time.monotonic())
            link.take_place(go)
        os.environ["EVERGRAD_GENERATION"] = str(go.generation)
        bootstrap = RendezvousStoreInfo(go.address, go.port)
        return RendezvousInfo(
            _ExitBarrierStore(self._link), go.node_rank, go.num_nodes, bootstrap
        )

    def shutdown(self) -> bool:
        """Report a failure and leave the run; the agent calls this when it ends without a signal."""
        self._link.report_failure()
        self._depart()
        return True

    def _forget_in_child(self) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        # Replace the descriptors instead of closing them: objects that the fork copied close them later.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._link.loop.inherited_descriptors():
            os.dup2(null, descriptor)
        os.close(null)

    def _depart(self) -> None:
        if os.getpid() == self._process and not self._is_closed:
            self._is_closed = True
            self._link.depart()
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(-1)
            shutil.rmtree(self._directory, ignore_errors=True)


class _Silence:
    """Measures how long one rendezvous has waited for the coordinator, and logs it."""

    def __init__(self, settings: "AgentSettings", *, now: float) -> None:
        self._settings = settings
        self._began = self._said = now

    def check(self, seconds_since_contact: float, *, now: float) -> None:
        """Print a message every ten seconds while the coordinator does not answer.

        Raises RendezvousTimeoutError if this lasts longer than the join timeout.
        """
        from evergrad_common.addresses import join_address
        from evergrad_trainer.worker.silence import SAY_SECONDS, describe_silence

        settings, waited = self._settings, min(seconds_since_contact, now - self._began)
        address = join_address(settings.host, settings.port)
        if waited > settings.join_seconds:
            text = (
                f"the coordinator at {address} has not answered for {settings.join_seconds:g} s "
                "(--rdzv-conf join_timeout)"
            )
            raise RendezvousTimeoutError(text)
        if min(waited, now - self._said) >= SAY_SECONDS:
            self._said = now
            words = describe_silence(
                address, seconds=waited, was_there=math.isfinite(seconds_since_contact)
            )
            print(f"evergrad: {words}", file=sys.stderr, flush=True)


class _ExitBarrierStore(HashStore):
    """The agent's store. With identical workers, torch uses it only for the barrier of agents whose workers
    have exited successfully.

    Therefore ``add`` is this node's vote, and ``wait`` returns when the coordinator has counted all votes.
    """

    def __init__(self, link: "AgentLink") -> None:
        super().__init__()
        self._link = link

    def add(self, key: str, amount: int) -> int:
        self._link.vote_done()
        return 0

    def wait(self, *_: object) -> None:
        with self._link.state.changed:
            while self._link.state.end is None:
                self._link.state.changed.wait(_WAIT_SECONDS)
            if self._link.state.end.exit_code != 0:
                raise SystemExit(self._link.state.end.exit_code)

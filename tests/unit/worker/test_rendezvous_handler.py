"""The rendezvous handler, with a coordinator that the test scripts and that records its messages."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from evergrad_coordinator.protocol import (
    Boundary,
    Broken,
    Done,
    End,
    Go,
    Hello,
    Leave,
    Leaving,
    Left,
    Message,
    Placement,
    Plan,
    Pong,
    Progress,
    Ready,
    Refused,
    Up,
    Welcome,
)
from evergrad_trainer.torchrun import agent_loop, rendezvous
from evergrad_trainer.torchrun.agent_workers import (
    SeenEnd,
    WorkerWatch,
    build_broken,
    classify,
    read_message,
)
from evergrad_trainer.torchrun.rendezvous import (
    EvergradRendezvousHandler,
    _Silence,
    create_handler,
    parse_settings,
)


class FakeClient:
    """Replaces the client; ``sent`` contains the node's messages."""

    newest: "FakeClient"

    def __init__(
        self,
        host: str,
        port: int,
        *,
        hello: Callable[[], Hello],
        on_message: Callable[[Message], None],
        on_connected: Callable[[], None],
    ) -> None:
        self.address, self.hello, self.on_message, self.on_connected = (
            (host, port),
            hello,
            on_message,
            on_connected,
        )
        self.sent: list[Message] = []
        self.seconds_since_contact = 0.0
        self.is_connected = True
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        FakeClient.newest = self

    async def run(self) -> None:
        await self._over.wait()

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    async def commit(self, generation: int) -> bool:
        return generation == 7

    def close(self) -> None:
        self._over.set()

    def fileno(self) -> int:
        return -1

    # ---- the test's side -----------------------------------------------------------------------------------

    def deliver(self, *messages: Message) -> None:
        """Deliver messages, and return when they were taken."""
        for message in messages:
            self.call(self.on_message, message)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        is_done = threading.Event()

        def run() -> None:
            function(*arguments)
            self._loop.call_soon(is_done.set)

        self._loop.call_soon_threadsafe(run)
        assert is_done.wait(PATIENCE)

    def find_sent(self, kind: type[Message], count: int = 1) -> list[Any]:
        """Wait until the node has sent at least ``count`` messages of this type."""
        until(
            lambda: sum(isinstance(message, kind) for message in self.sent) >= count,
            f"{count} × {kind.__name__}",
        )
        return [message for message in self.sent if isinstance(message, kind)]

    def never_sent(self, kind: type[Message]) -> bool:
        self.call(lambda: None)
        return not any(isinstance(message, kind) for message in self.sent)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


TOKEN_FILE = __file__
"""Any file that can be read."""


def parameters(**config: Any) -> RendezvousParameters:
    given = {
        "endpoint": "127.0.0.1:29400",
        "run_id": "run",
        "local_addr": "127.0.0.1",
        "node": "2",
        "token_file": TOKEN_FILE,
        **config,
    }
    return RendezvousParameters(backend="evergrad", min_nodes=1, max_nodes=4, **given)


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[EvergradRendezvousHandler]:
    for name in (
        "EVERGRAD_GENERATION",
        "EVERGRAD_NODE_STATE",
        "TORCH_ELASTIC_WORKER_IDENTICAL",
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(agent_loop, "CoordinatorClient", FakeClient)
    monkeypatch.setattr(agent_loop.Heartbeat, "start", lambda self: None)
    before = signal.set_wakeup_fd(-1)
    one = EvergradRendezvousHandler(parse_settings(parameters(), {}))
    yield one
    one.shutdown()
    signal.set_wakeup_fd(before)


class Rendezvous(threading.Thread):
    """``next_rendezvous`` as the agent's thread would call it."""

    def __init__(self, handler: EvergradRendezvousHandler) -> None:
        super().__init__(daemon=True)
        self._handler = handler
        self.info: RendezvousInfo | None = None
        self.exit_code: object = None
        self.start()

    def run(self) -> None:
        try:
            self.info = self._handler.next_rendezvous()
        except SystemExit as stop:
            self.exit_code = stop.code

    def wait(self) -> RendezvousInfo:
        self.join(PATIENCE)
        assert self.info is not None
        return self.info


def join(
    handler: EvergradRendezvousHandler,
    generation: int = 7,
    *,
    node_rank: int = 1,
    num_nodes: int = 2,
) -> RendezvousInfo:
    """Takes part in a group."""
    client = FakeClient.newest
    rendezvous = Rendezvous(handler)
    client.deliver(plan(generation))
    until(
        lambda: any(
            isinstance(one, Ready) and one.generation == generation for one in client.sent
        ),
        "ready",
    )
    client.deliver(go(generation, node_rank=node_rank, num_nodes=num_nodes))
    return rendezvous.wait()


def plan(generation: int, *, hard: bool = True, is_member: bool = True) -> Plan:
    return Plan(generation, hard=hard, is_member=is_member, reason="test")


def go(generation: int, *, node_rank: int = 1, num_nodes: int = 2, port: int = 5) -> Go:
    return Go(generation, node_rank, 1, num_nodes, node_rank, num_nodes, "10.0.0.1", port)


# ---- arguments ---------------------------------------------------------------------------------------------


def test_arguments_become_settings(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    given = parse_settings(
        parameters(lease="4", token_file=str(token), timeout=900), {"EVERGRAD_NODE": "9"}
    )
    assert (given.run, given.node, given.host, given.port, given.address) == (
        "run",
        "2",
        "127.0.0.1",
        29400,
        "127.0.0.1",
    )
    assert (given.lease_seconds, given.token_file) == (4.0, token)
    assert given.fingerprint.keys() == {"torch"}


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({"EVERGRAD_NODE": "3"}, "3"),
        ({"JOB_COMPLETION_INDEX": "4"}, "4"),
        ({"EVERGRAD_NODE": "3", "JOB_COMPLETION_INDEX": "4"}, "3"),
    ],
)
def test_the_index_of_the_node_can_come_from_the_environment(
    environment: dict[str, str], node: str
) -> None:
    assert parse_settings(parameters(node=""), environment).node == node


def test_an_ipv6_address_is_used_without_its_brackets() -> None:
    assert parse_settings(parameters(endpoint="[::1]:29400"), {}).host == "::1"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"endpoint": "host"}, "--rdzv-endpoint 'host': not HOST:PORT"),
        ({"endpoint": ":29400"}, "--rdzv-endpoint ':29400': not HOST:PORT"),
        ({"endpoint": "host:99999"}, "not HOST:PORT"),
        ({"run_id": "none"}, "--rdzv-id: missing"),
        ({"node": ""}, "--rdzv-conf node: missing"),
        ({"lease": "soon"}, "--rdzv-conf lease: 'soon' is no number of seconds above zero"),
        ({"lease": "0"}, "--rdzv-conf lease: '0'"),
        ({"token_file": "/nowhere"}, "token_file: /nowhere cannot be read"),
        ({"token_file": ""}, "--rdzv-conf token_file: missing"),
        (
            {"join_timeout": "0"},
            "--rdzv-conf join_timeout: '0' is no number of seconds above zero.",
        ),
        (
            {"colour": "red"},
            "--rdzv-conf colour: no such key. The keys are join_timeout, lease, node, token_file.",
        ),
    ],
)
def test_an_invalid_argument_is_reported_with_its_remedy(
    config: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        parse_settings(parameters(**config), {})
    assert message in str(caught.value)


def test_all_invalid_arguments_are_reported_together_with_exit_code_64(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EVERGRAD_NODE", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        create_handler(parameters(endpoint="x", run_id="none", node=""))
    assert caught.value.code == 64
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


def test_torch_finds_the_backend_and_loading_it_is_fast() -> None:
    code = (
        "import sys; from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as r; "
        "import evergrad_trainer.torchrun.rendezvous as e; "
        "ours = [m for m in sys.modules if m.startswith(('evergrad_coordinator', 'evergrad_trainer.'))]; "
        "print('evergrad' in r._registry, ours)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    ).stdout
    assert (
        output
        == "True ['evergrad_trainer.torchrun', 'evergrad_trainer.torchrun.rendezvous']\n"
    )


# ---- from plan to group ------------------------------------------------------------------------------------


@pytest.mark.capability("O-42")
def test_a_group_is_joined_by_plan_ready_and_go(handler: EvergradRendezvousHandler) -> None:
    client = FakeClient.newest
    first = client.hello()
    assert (first.run, first.node, first.workers, first.recovery, first.had) == (
        "run",
        "2",
        1,
        "fresh",
        None,
    )
    info = join(handler, 7, node_rank=1, num_nodes=2)
    assert (info.rank, info.world_size) == (1, 2)
    assert info.bootstrap_store_info is not None
    assert (
        info.bootstrap_store_info.master_addr,
        info.bootstrap_store_info.master_port,
    ) == (
        "10.0.0.1",
        5,
    )
    ready = client.find_sent(Ready)[0]
    assert (ready.generation, ready.workers) == (7, 1)
    with socket.create_connection(("127.0.0.1", ready.port), timeout=PATIENCE):
        pass  # the store exists before its address is sent
    assert client.hello().had == Placement(7, first_rank=1, workers=1, world_size=2)
    assert os.environ["EVERGRAD_GENERATION"] == "7"
    assert handler.use_agent_store


def test_each_plan_gets_its_own_store(handler: EvergradRendezvousHandler) -> None:
    client = FakeClient.newest
    rendezvous = Rendezvous(handler)
    client.deliver(plan(7))
    first = client.find_sent(Ready)[0]
    client.deliver(plan(8))
    second = client.find_sent(Ready, 2)[1]
    assert second.generation == 8
    assert second.port != first.port
    # The older group's go arrives late: it began without this node's consent.
    client.deliver(go(7))
    assert rendezvous.is_alive()
    client.deliver(go(8))
    assert rendezvous.wait().rank == 1
    assert client.hello().had == Placement(8, 1, 1, 2)


def test_a_spare_reports_itself_as_such_and_waits(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    rendezvous = Rendezvous(handler)
    client.deliver(plan(7, is_member=False))
    assert client.find_sent(Ready)[0].port == 0
    assert rendezvous.is_alive()
    client.deliver(End(0, "complete"))
    rendezvous.join(PATIENCE)
    assert rendezvous.exit_code == 0


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (End(0, "complete"), 0),
        (End(75, "replaced", "a newer process"), 75),
        (Refused("token", "another token", 64), 70),
    ],
)
def test_the_exit_code_of_the_coordinator_is_the_exit_code_of_the_agent(
    handler: EvergradRendezvousHandler,
    capfd: pytest.CaptureFixture[str],
    message: End | Refused,
    code: int,
) -> None:
    FakeClient.newest.deliver(message)
    rendezvous = Rendezvous(handler)
    rendezvous.join(PATIENCE)
    assert rendezvous.exit_code == code
    assert message.message in capfd.readouterr().err
    assert handler.is_closed()


def test_a_rendezvous_without_a_coordinator_logs_it_and_ends_at_the_join_timeout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = parse_settings(parameters(timeout=900, join_timeout=35), {})
    assert settings.join_seconds == 35
    assert parse_settings(parameters(timeout=900), {}).join_seconds == 900
    silence, never = _Silence(settings, now=100.0), float("inf")
    for now in (101.0, 109.0, 111.0, 119.0, 122.0, 134.0):
        silence.check(never, now=now)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in said] == [
        f"evergrad: the coordinator at 127.0.0.1:29400 has never answered, in {seconds} s"
        for seconds in (11, 22, 34)
    ]
    silence.check(20.0, now=150.0)
    assert "has not answered for 20 s; still trying. Check" in capsys.readouterr().err
    with pytest.raises(
        RendezvousTimeoutError, match=r"127\.0\.0\.1:29400 has not answered for 35 s"
    ):
        silence.check(36.0, now=151.0)


def test_a_spare_known_to_the_coordinator_may_wait_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silence = _Silence(parse_settings(parameters(join_timeout=35), {}), now=100.0)
    silence.check(0.4, now=10_000.0)
    assert capsys.readouterr().err == ""


def test_the_handler_raises_the_error_of_torch(
    handler: EvergradRendezvousHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(
        handler, "_settings", parse_settings(parameters(join_timeout=0.1), {})
    )
    FakeClient.newest.seconds_since_contact = float("inf")
    with pytest.raises(RendezvousTimeoutError):
        handler.next_rendezvous()


# ---- while workers run -------------------------------------------------------------------------------------


def test_workers_continue_without_changes_and_the_group_is_reported_up_once(
    handler: EvergradRendezvousHandler,
) -> None:
    join(handler)
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert FakeClient.newest.find_sent(Up) == [Up(7, -1)]


@pytest.mark.parametrize(
    "message",
    [plan(8), plan(8, hard=False), Pong(8), Welcome(8, 10.0, 3.0), End(70, "failed")],
)
def test_workers_are_stopped_when_their_group_ends(
    handler: EvergradRendezvousHandler, message: Message
) -> None:
    join(handler)
    FakeClient.newest.deliver(message)
    assert handler.num_nodes_waiting() == 1


def test_workers_are_stopped_when_the_lease_is_lost(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    join(handler)
    client.deliver(Welcome(7, 4.0, 3.0))
    client.seconds_since_contact = 3.9
    assert handler.num_nodes_waiting() == 0
    client.seconds_since_contact = 4.1
    assert handler.num_nodes_waiting() == 1
    rendezvous = Rendezvous(handler)
    until(lambda: client.hello().had is None, "the place to be given up")
    assert client.never_sent(Broken)
    client.deliver(End(0, "complete"))
    rendezvous.join(PATIENCE)


def test_an_unrequested_rendezvous_is_a_failure(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    join(handler)
    assert handler.num_nodes_waiting() == 0
    rendezvous = Rendezvous(handler)
    broken = client.find_sent(Broken)
    assert [(one.generation, one.cause) for one in broken] == [(7, "worker_crash")]
    assert client.hello().had is None
    client.deliver(End(70, "failed"))
    rendezvous.join(PATIENCE)
    assert rendezvous.exit_code == 70


def test_a_requested_rendezvous_is_not_a_failure(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    join(handler)
    client.deliver(plan(8))
    assert handler.num_nodes_waiting() == 1
    rendezvous = Rendezvous(handler)
    client.find_sent(Ready, 2)
    assert client.never_sent(Broken)
    client.deliver(go(8))
    rendezvous.wait()


def test_workers_that_stop_gracefully_get_the_time_for_it(
    handler: EvergradRendezvousHandler,
) -> None:
    join(handler)
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(os.path.join(os.environ["EVERGRAD_NODE_STATE"], "socket"))
        worker.sendall(b'{"type": "guard", "generation": 7}\n')
        until(lambda: handler._link.loop.node_state.has_guard(7), "the guard")
        FakeClient.newest.deliver(plan(8, hard=False))
        assert handler.num_nodes_waiting() == 0
        FakeClient.newest.deliver(plan(9, hard=True))
        assert handler.num_nodes_waiting() == 1


# ---- the end -----------------------------------------------------------------------------------------------


def test_the_exit_barrier_is_a_vote_that_lasts_until_the_coordinator_has_counted(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    store = join(handler).store
    assert store.add("barrier", 1) == 0
    assert client.find_sent(Done) == [Done(7)]
    assert client.find_sent(Up) == [Up(7, -1)]
    waiting = threading.Thread(target=store.wait, args=(["barrier"],), daemon=True)
    waiting.start()
    # The others form a new group without this node, which reports that its workers have exited. A new
    # connection receives the vote again.
    client.deliver(plan(8, is_member=False))
    assert client.find_sent(Ready, 2)[1] == Ready(8, workers=0, port=0)
    client.call(client.on_connected)
    assert client.find_sent(Done, 2) == [Done(7), Done(7)]
    assert waiting.is_alive()
    client.deliver(End(0, "complete"))
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_the_last_progress_is_sent_before_the_vote_that_may_end_the_run(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    store = join(handler).store
    client.call(
        handler._link.loop.members.take_report, {"step": 9, "rank": 0, "generation": 7}
    )
    store.add("barrier", 1)
    client.find_sent(Done)
    kinds = [type(message) for message in client.sent]
    assert kinds.index(Progress) < kinds.index(Done)


def test_a_run_that_fails_during_the_exit_barrier_fails_the_agent(
    handler: EvergradRendezvousHandler,
) -> None:
    store = join(handler).store
    store.add("barrier", 1)
    FakeClient.newest.deliver(End(70, "failed"))
    with pytest.raises(SystemExit) as caught:
        store.wait(["barrier"])
    assert caught.value.code == 70


def test_workers_that_ended_successfully_only_on_a_stop_request_are_not_done(
    handler: EvergradRendezvousHandler,
) -> None:
    store = join(handler).store
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(os.path.join(os.environ["EVERGRAD_NODE_STATE"], "socket"))
        worker.sendall(b'{"type": "stopping", "generation": 7}\n')
        until(
            lambda: handler._link.loop.node_state.has_stopped(7), "the word of the worker"
        )
    with pytest.raises(SystemExit) as caught:
        store.add("barrier", 1)
    assert caught.value.code == 75
    assert FakeClient.newest.never_sent(Done)


def test_a_signal_is_reported_at_once_and_the_node_drains(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    join(handler)
    os.write(handler._link.loop.wakeup.write_end, bytes([signal.SIGCHLD]))
    os.write(handler._link.loop.wakeup.write_end, bytes([signal.SIGTERM, signal.SIGTERM]))
    assert client.find_sent(Leaving) == [Leaving()]
    assert client.hello().workers == 0
    client.deliver(plan(8, hard=False, is_member=False))
    handler.shutdown()
    assert client.find_sent(Ready, 2)[1] == Ready(8, workers=0, port=0)
    assert client.find_sent(Left) == [Left(8, is_saved=False)]
    assert not any(isinstance(message, Broken) for message in client.sent)


def test_a_node_that_receives_leave_confirms_it_and_exits(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    client.deliver(Leave(8, save=False))
    assert client.find_sent(Left) == [Left(8, is_saved=False)]
    assert handler.is_closed()


def test_a_closed_handler_leaves_no_directory(
    handler: EvergradRendezvousHandler,
) -> None:
    directory = Path(os.environ["EVERGRAD_NODE_STATE"])
    assert directory.is_dir()
    handler.shutdown()
    assert not directory.exists()


# ---- reports of workers --------------------------------------------------------------------------------


def test_reports_of_rank_0_become_progress_and_a_new_checkpoint_a_boundary(
    handler: EvergradRendezvousHandler,
) -> None:
    client = FakeClient.newest
    join(handler)
    take = handler._link.loop.members.take_report
    client.call(
        take,
        {
            "step": 3,
            "rank": 0,
            "generation": 7,
            "total_steps": 9,
            "loss": 1,
            "tokens_per_second": 2.5,
        },
    )
    client.call(take, {"step": 99, "rank": 1, "generation": 7})
    client.call(take, {"step": 98, "rank": 0, "generation": 6})
    client.call(take, {"step": 4, "rank": 0, "generation": 7, "checkpoint_step": 4})
    client.call(take, {"step": 5, "rank": 0, "generation": 7, "checkpoint_step": 4})
    assert client.find_sent(Boundary) == [Boundary(7, 4)]
    progress = client.find_sent(Progress)
    assert all(one.step < 10 for one in progress)
    first = next(one for one in progress if one.step == 4)
    assert (
        first.total_steps,
        first.loss,
        first.tokens_per_second,
        first.checkpoint_step,
    ) == (
        9,
        1.0,
        2.5,
        4,
    )
    assert first.eta_seconds is not None
    until(lambda: client.find_sent(Progress)[-1].step == 5, "the newest step")
    assert handler._link.loop.members.reports.step == 5


def test_commits_are_requested_only_for_the_own_generation(
    handler: EvergradRendezvousHandler,
) -> None:
    join(handler)
    link = handler._link
    assert link.loop._loop is not None

    def ask(generation: int) -> bool:
        assert link.loop._loop is not None
        return asyncio.run_coroutine_threadsafe(
            link.loop._may_commit(generation), link.loop._loop
        ).result(PATIENCE)

    assert ask(7)
    assert not ask(6)
    FakeClient.newest.is_connected = False
    FakeClient.newest.seconds_since_contact = 1000.0
    assert not ask(7)


# ---- how workers end ---------------------------------------------------------------------------------------


def run_watched(directory: Path, code: str, **variables: str) -> list[SeenEnd]:
    """The ends that a watch sees of one worker that runs ``code``."""
    ends: list[SeenEnd] = []

    async def main() -> None:
        watch = WorkerWatch(port=12345, on_end=ends.append)
        environment = {
            **os.environ,
            "LOCAL_RANK": "0",
            "RANK": "3",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": "12345",
            **variables,
        }
        environment["TORCHELASTIC_ERROR_FILE"] = str(directory / "error.json")
        worker = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE
        )
        try:
            finding = asyncio.create_task(watch.find())
            if "MASTER_PORT" in variables:
                await asyncio.sleep(0.2)
                finding.cancel()
            else:
                await asyncio.wait_for(finding, PATIENCE)
            assert worker.stdin is not None
            worker.stdin.close()
            deadline = time.monotonic() + PATIENCE
            while (
                not (watch.are_gone or "MASTER_PORT" in variables)
                and time.monotonic() < deadline
            ):
                await asyncio.sleep(0.005)
        finally:
            watch.close()
            worker.kill()
            worker.wait()

    asyncio.run(main())
    return ends


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.abort()", -6),
    ],
)
def test_the_end_of_a_worker_is_observed_before_the_agent_reaps_it(
    tmp_path: Path, code: str, exit_code: int
) -> None:
    began = time.monotonic()
    ends = run_watched(tmp_path, f"import os, signal, sys; sys.stdin.read(); {code}")
    assert [(end.rank, end.exit_code) for end in ends] == [(3, exit_code)]
    assert began < ends[0].at <= time.monotonic()


def test_children_that_are_not_workers_of_this_group_are_ignored(tmp_path: Path) -> None:
    assert run_watched(tmp_path, "import sys; sys.stdin.read()", MASTER_PORT="54321") == []


def test_the_message_is_read_from_the_error_file(tmp_path: Path) -> None:
    error = {"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "1"}}}
    (tmp_path / "error.json").write_text(json.dumps(error))
    assert (
        run_watched(tmp_path, "import sys; sys.stdin.read(); sys.exit(1)")[0].message
        == "ValueError: no"
    )


def test_without_an_error_file_the_message_is_the_end_of_the_log(tmp_path: Path) -> None:
    assert read_message(None) == ""
    assert read_message(os.devnull) == ""
    assert read_message(str(tmp_path / "error.json")) == ""
    (tmp_path / "stderr.log").write_text("Traceback\nValueError: from the log\n\n")
    assert read_message(str(tmp_path / "error.json")) == "ValueError: from the log"
    (tmp_path / "error.json").write_text('{"message": "plain"}')
    assert read_message(str(tmp_path / "error.json")) == "plain"


@pytest.mark.parametrize(
    ("exit_code", "message", "world_size", "cause"),
    [
        (1, "ValueError: shapes", 2, "worker_crash"),
        (-9, "", 2, "worker_crash"),
        (None, "", 2, "worker_crash"),
        (1, "RuntimeError: Connection closed by peer [10.0.0.3]:4", 2, "peer_lost"),
        (1, "RuntimeError: Connection closed by peer [10.0.0.3]:4", 1, "worker_crash"),
        (
            1,
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            2,
            "worker_crash",
        ),
        (1, "DistBackendError: NCCL remote error", 2, "peer_lost"),
        (75, "", 1, "peer_lost"),
        (64, "no such file", 2, "user_error"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", 2, "out_of_memory"),
    ],
)
def test_a_failure_is_classified_by_cause(
    exit_code: int | None, message: str, world_size: int, cause: str
) -> None:
    end = SeenEnd(rank=1, exit_code=exit_code, at=10.0, message=message)
    assert classify(end, world_size=world_size) == cause
    broken = build_broken(7, end=end, world_size=world_size, step=4, now=12.5)
    assert (broken.rank, broken.step, broken.exit_code, broken.time_since) == (
        1,
        4,
        exit_code,
        2.5,
    )
    assert broken.is_final == (exit_code == 64)


def test_a_forked_child_inherits_neither_connection_nor_pipe(
    handler: EvergradRendezvousHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        accepted, _ = server.accept()
        accepted.settimeout(PATIENCE)
        monkeypatch.setattr(FakeClient.newest, "fileno", connection.fileno)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            is_closed = os.readlink(f"/proc/self/fd/{connection.fileno()}") == os.devnull
            os.write(
                write_end, b"1" if is_closed and signal.set_wakeup_fd(-1) == -1 else b"0"
            )
            signal.pause()
        try:
            assert os.read(read_end, 1) == b"1"
            connection.close()
            # The end is seen although the child lives.
            assert accepted.recv(1) == b""
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            accepted.close()
            os.close(read_end)
            os.close(write_end)
            monkeypatch.undo()

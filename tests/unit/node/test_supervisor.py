"""A supervisor, and a coordinator that the test scripts: which messages it sends, and which it repeats after
a reconnect."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from patience import PATIENCE

from evergrad_common.codec import encode
from evergrad_common.contract import ErrorKind, ExitCode, decode_termination
from evergrad_coordinator.protocol import (
    Boundary,
    Broken,
    Capacity,
    Done,
    End,
    Go,
    Hello,
    Leave,
    Leaving,
    Left,
    Message,
    Ping,
    Placement,
    Plan,
    Progress,
    Ready,
    Refused,
    Restoring,
    Result,
    Welcome,
    decode_from_node,
)
from evergrad_trainer.node import coordinator_link, stop_requests, supervisor
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.reports import NoWorkers, WorkersLeft, WorkersReady
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.node.supervisor import Supervisor
from evergrad_trainer.node.worker_group import WorkerGroup
from evergrad_trainer.worker import channel

M = TypeVar("M", bound=Message)


@dataclass
class FakeWorkerGroup:
    """Workers that are only numbers. Stores its calls."""

    capacity: int = 0
    place: Go | None = None
    is_empty: bool = True
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.told.append((name, *args, *kwargs.values()))

    def was_notified(self, name: str) -> list[tuple[Any, ...]]:
        return [one[1:] for one in self.told if one[0] == name]


class Peer:
    """The coordinator's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def receive(self, kind: type[M]) -> M:
        """The next message of a kind; pings and others are passed over."""
        while line := await asyncio.wait_for(self._reader.readline(), PATIENCE):
            message = decode_from_node(line)
            if isinstance(message, kind):
                return message
        raise EOFError(f"the node has hung up before {kind.TYPE}")

    async def receive_until(self, kind: type[Message]) -> list[Message]:
        """Return all messages up to the first of a type, without pings."""
        found: list[Message] = []
        while not found or not isinstance(found[-1], kind):
            message = await self.receive(Message)
            found += [] if isinstance(message, Ping) else [message]
        return found

    def send(self, message: Message) -> None:
        self.writer.write(encode(message))


@dataclass
class Scene:
    """A supervisor under test."""

    supervisor: Supervisor
    group: FakeWorkerGroup
    connections: "asyncio.Queue[Peer]"

    async def accept(self) -> Peer:
        return await asyncio.wait_for(self.connections.get(), PATIENCE)

    async def welcome(self) -> Peer:
        peer = await self.accept()
        await peer.receive(Hello)
        peer.send(Welcome(generation=0, lease_seconds=10.0, silence_seconds=3.0))
        # Its first sign that it has read this.
        await peer.receive(Ping)
        return peer


def play(
    directory: Path,
    script: Callable[[Scene], Awaitable[None]],
    *,
    grace_seconds: float = 600.0,
) -> int:
    """Run ``script`` with a supervisor; return the supervisor's exit code."""

    async def run() -> int:
        connections: asyncio.Queue[Peer] = asyncio.Queue()

        writers: list[asyncio.StreamWriter] = []

        async def connected(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writers.append(writer)
            await connections.put(Peer(reader, writer))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        settings = NodeSettings(
            run="tiny",
            node="1",
            coordinator_host="127.0.0.1",
            coordinator_port=server.sockets[0].getsockname()[1],
            address="127.0.0.1",
            recovery="in-process",
            run_directory=directory,
            termination_log=directory / "last-words",
            grace_seconds=grace_seconds,
        )
        scene = Scene(
            Supervisor(settings, metrics=NodeMetrics("tiny", "1")),
            FakeWorkerGroup(),
            connections,
        )
        serving = asyncio.create_task(scene.supervisor.run(cast(WorkerGroup, scene.group)))
        try:
            await script(scene)
            return await asyncio.wait_for(serving, PATIENCE)
        finally:
            serving.cancel()
            server.close()
            for writer in writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def test_workers_that_become_warm_between_hello_and_welcome_are_counted(
    tmp_path: Path,
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        assert (await peer.receive(Hello)).workers == 0
        scene.group.capacity = 2
        scene.supervisor.take(Capacity(2))
        peer.send(Welcome(generation=0, lease_seconds=10.0, silence_seconds=3.0))
        assert (await peer.receive(Capacity)).workers == 2
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_lost_connection_is_restored_with_the_current_placement(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        plan = Plan(
            7, hard=False, is_member=True, reason="3 nodes connected", cause="node_joined"
        )
        peer.send(plan)
        told = (
            channel.WorkerPlan(7, hard=False),
            "node_joined",
            "3 nodes connected",
            False,
        )
        await until(lambda: scene.group.was_notified("change") == [told])
        scene.group.place = Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000)
        peer.writer.close()
        again = await scene.accept()
        hello = await again.receive(Hello)
        assert hello.had == Placement(generation=7, first_rank=2, workers=1, world_size=3)
        assert hello.known_generation == 7
        again.send(Welcome(generation=7, lease_seconds=10.0, silence_seconds=3.0))
        again.send(End(exit_code=75, reason="stopped"))

    assert play(tmp_path, script) == 75


@pytest.mark.parametrize(
    "broken", [None, Broken(7, "worker_crash", rank=2, message="ended with exit code 3")]
)
def test_a_group_left_between_hello_and_welcome_is_not_reported_as_running(
    tmp_path: Path, broken: Broken | None
) -> None:
    async def script(scene: Scene) -> None:
        scene.group.place = Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000)
        peer = await scene.accept()
        assert (await peer.receive(Hello)).had == Placement(
            generation=7, first_rank=2, workers=1, world_size=3
        )
        scene.group.place = None
        if broken is not None:
            scene.supervisor.take(broken)
        peer.send(Welcome(generation=7, lease_seconds=10.0, silence_seconds=3.0))
        said = await peer.receive(Broken)
        assert said.generation == 7 and said.cause == (
            "peer_lost" if broken is None else "worker_crash"
        )
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_done_node_keeps_its_placement_until_a_coordinator_receives_it(
    tmp_path: Path,
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        await peer.receive(Hello)
        peer.send(Welcome(generation=7, lease_seconds=0.1, silence_seconds=3.0))
        scene.group.place = Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000)
        scene.supervisor.take(Done(7))
        await peer.receive(Done)
        await until(lambda: scene.supervisor.conversation.seconds_since_contact > 0.1)
        num_ticks = len(scene.group.was_notified("tick"))
        await until(lambda: len(scene.group.was_notified("tick")) > num_ticks + 2)
        assert not scene.group.was_notified("change"), (
            "it would leave the group whose end nobody has heard of"
        )
        peer.writer.close()
        again = await scene.accept()
        assert (await again.receive(Hello)).had == Placement(7, 2, 1, 3)
        again.send(Welcome(generation=1 << 32, lease_seconds=10.0, silence_seconds=3.0))
        assert await again.receive(Done) == Done(7)
        again.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_state_growth_is_reported_only_to_a_coordinator_that_supports_the_message(
    tmp_path: Path, is_known: bool
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        await peer.receive(Hello)
        if is_known:
            peer.send(Welcome(0, 10.0, 3.0, takes_restoring=True))
        else:
            # The message of a coordinator of an earlier version.
            line = b'{"type":"welcome","generation":0,"leaseSeconds":10.0,"silenceSeconds":3.0}'
            peer.writer.write(line + b"\n")
        await peer.receive(Ping)
        scene.supervisor.take(Restoring(3, 1000))
        scene.supervisor.take(Capacity(7))
        said = await peer.receive_until(Capacity)
        while cast(Capacity, said[-1]).workers != 7:
            said += await peer.receive_until(Capacity)
        assert (Restoring(3, 1000) in said) is is_known
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_each_plan_is_answered_with_its_own_store(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        ports = set()
        for generation in (3, 4):
            scene.supervisor.take(WorkersReady(generation, workers=1, step=5))
            ready = await peer.receive(Ready)
            assert (ready.generation, ready.workers, ready.step) == (generation, 1, 5)
            ports.add(ready.port)
        assert len(ports) == 2
        peer.send(Leave(4, save=True))
        await until(lambda: scene.group.was_notified("depart") == [(4, True)])
        scene.supervisor.take(WorkersLeft(is_saved=False))
        assert (await peer.receive(Left)).is_saved is False

    assert play(tmp_path, script) == 76


def test_the_next_store_opens_with_the_plan_and_the_old_one_closes_with_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_store = supervisor.open_store

    def note(address: str) -> Any:
        store = open_store(address)
        opened.append(store.port)
        return store

    monkeypatch.setattr(supervisor, "open_store", note)

    def is_open(port: int) -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
            return True
        return False

    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        scene.supervisor.take(WorkersReady(3, workers=1, step=5))
        await peer.receive(Ready)

        # A plan that is not hard: the group trains on up to its boundary, with its store.
        peer.send(Plan(generation=4, hard=False, is_member=True, reason="a node joins"))
        await until(lambda: len(opened) == 2)
        assert is_open(opened[0])

        scene.supervisor.take(WorkersReady(4, workers=1, step=6))
        assert (await peer.receive(Ready)).port == opened[1]
        assert len(opened) == 2 and not is_open(opened[0])
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_checkpoint_is_announced_once_with_its_own_step(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        for step, checkpoint_step in (
            (10, None),
            (12, 10),
            (13, 10),
            (14, 10),
            (25, 20),
            (26, 20),
        ):
            scene.supervisor.reported(
                {
                    "rank": 0,
                    "generation": 3,
                    "step": step,
                    "checkpoint_step": checkpoint_step,
                }
            )
        scene.supervisor.reported(
            {"rank": 1, "generation": 3, "step": 26, "checkpoint_step": 25}
        )
        scene.supervisor.take(Done(3))
        said = await peer.receive_until(Done)
        assert [one for one in said if isinstance(one, Boundary)] == [
            Boundary(3, 10),
            Boundary(3, 20),
        ]
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


@pytest.mark.parametrize(
    ("finish", "last"),
    [
        (lambda supervisor: supervisor.take(Done(3)), Done),
        (lambda supervisor: supervisor.take(Result(3, 0, 75, "stopped")), Result),
        (
            lambda supervisor: supervisor.take(channel.WorkerResult(3, 30, 0, "complete")),
            Result,
        ),
        (lambda supervisor: supervisor.take(WorkersReady(4, workers=1, step=-1)), Ready),
    ],
)
def test_the_last_of_many_quick_steps_is_reported_before_the_end(
    tmp_path: Path, finish: Callable[[Supervisor], None], last: type[Message]
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        for step in range(1, 31):
            scene.supervisor.reported({"step": step, "generation": 3})
        finish(scene.supervisor)
        said = await peer.receive_until(last)
        assert [one.step for one in said if isinstance(one, Progress)] == [1, 30]
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_report_that_is_read_after_its_process_ended_precedes_the_end(
    tmp_path: Path,
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        scene.supervisor.take(Done(3))
        await asyncio.sleep(0)
        scene.supervisor.reported({"step": 30, "generation": 3})
        said = await peer.receive_until(Done)
        assert [one.step for one in said if isinstance(one, Progress)] == [30]
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_step_without_a_successor_for_long_is_reported(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        for step in (1, 2):
            scene.supervisor.reported({"step": step, "generation": 3})
        assert [
            (await peer.receive(Progress)).step,
            (await peer.receive(Progress)).step,
        ] == [
            1,
            2,
        ]
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_the_background_save_of_a_typed_run_is_reported_with_its_step(
    tmp_path: Path,
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        supervisor = scene.supervisor
        supervisor.reported({"step": 23, "generation": 3})
        event = {
            "type": "save",
            "time": 1.0,
            "step": 23,
            "generation": 3,
            "checkpoint": "step-20",
        }
        supervisor.take(channel.Observed("event", event))
        assert await peer.receive(Boundary) == Boundary(3, 20)
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        (
            End(
                exit_code=70,
                reason="FailuresWithoutProgress",
                message="rank 1 failed 3 times",
            ),
            70,
            ErrorKind.INTERNAL,
        ),
        (
            End(exit_code=64, reason="UserError", message="the data is empty"),
            64,
            ErrorKind.INPUT,
        ),
    ],
)
def test_the_last_message_of_the_coordinator_is_the_result_of_the_node(
    tmp_path: Path, message: Any, code: int, kind: ErrorKind
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        await peer.receive(Hello)
        peer.send(message)

    assert play(tmp_path, script) == code
    assert decode_termination((tmp_path / "last-words").read_text()) == (
        kind,
        message.message,
    )


REFUSED = Refused(
    reason="FingerprintDiffers", message="configuration: here a, there b", exit_code=64
)


@pytest.mark.parametrize(
    ("kind", "code"), [(ErrorKind.INPUT, 64), (ErrorKind.INTERNAL, 70)]
)
def test_a_node_whose_workers_all_failed_ends_with_their_kind_of_error(
    tmp_path: Path, kind: ErrorKind, code: int
) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        scene.supervisor.take(NoWorkers("mine.py:3: no w", kind, ExitCode(code)))

    assert play(tmp_path, script) == code
    said, text = decode_termination((tmp_path / "last-words").read_text())
    assert said == kind and text.endswith(": mine.py:3: no w")


def test_a_refused_node_retries_a_few_times_and_is_then_left_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_link, "_REFUSED_SECONDS", (0.01, 0.01, 0.01))

    async def script(scene: Scene) -> None:
        for _ in range(4):
            peer = await scene.accept()
            await peer.receive(Hello)
            peer.send(REFUSED)

    assert play(tmp_path, script) == 70, (
        "whatever code a coordinator of another version names"
    )
    kind, text = decode_termination((tmp_path / "last-words").read_text())
    assert kind is ErrorKind.ENVIRONMENT
    assert socket.gethostname() in text and REFUSED.message in text


def test_a_node_that_is_admitted_after_refusals_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_link, "_REFUSED_SECONDS", (0.01,))

    async def script(scene: Scene) -> None:
        for _ in range(2):
            peer = await scene.accept()
            await peer.receive(Hello)
            peer.send(REFUSED)
            peer = await scene.welcome()
            peer.writer.close()
        peer = await scene.welcome()
        peer.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_refused_node_can_be_asked_to_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_link, "_REFUSED_SECONDS", (3600.0,))

    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        await peer.receive(Hello)
        peer.send(REFUSED)
        await until(lambda: scene.supervisor.conversation.num_refusals == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: scene.group.was_notified("depart") == [(None, True)])
        scene.supervisor.take(WorkersLeft(is_saved=True))

    assert play(tmp_path, script) == 75


def test_a_value_that_no_message_can_contain_is_dropped_alone_and_not_sent_later(
    tmp_path: Path,
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        nan = float("nan")
        scene.supervisor.reported(
            {"step": 5, "generation": 3, "loss": nan, "tokens_per_second": 7.0}
        )
        assert await peer.receive(Progress) == Progress(3, 5, tokens_per_second=7.0)
        # As a fault in ourselves would have it.
        scene.supervisor._progress.note(Progress(3, 6, loss=nan))
        scene.supervisor._progress.flush()
        peer.writer.close()
        again = await scene.welcome()
        scene.supervisor.reported({"step": 7, "generation": 3, "loss": 0.5})
        assert (await again.receive(Progress)).step == 7
        again.send(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize(
    "part",
    ["tick", "conversation with the coordinator", "last words", "take_report", "leave"],
)
def test_a_node_ends_with_its_reason_if_a_part_of_its_supervisor_fails(
    tmp_path: Path, part: str
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        supervisor = scene.supervisor
        match part:
            case "tick":
                scene.group.tick = fail
            case "conversation with the coordinator":
                scene.group.change = fail
                peer.send(Plan(7, hard=False, is_member=True, reason="3 nodes connected"))
            case "last words":
                supervisor._progress.flush = fail  # type: ignore[method-assign]
                # The tick flushes, too, and must not be first.
                supervisor._progress.flush_if_due = lambda: None  # type: ignore[method-assign]
                supervisor.take(Done(3))
            case "take_report":
                supervisor._metrics.report = fail  # type: ignore[method-assign, assignment]
                supervisor.reported({"step": 5, "generation": 3})
            case "leave":
                supervisor._departure._log = fail
                os.kill(os.getpid(), signal.SIGTERM)

    assert play(tmp_path, script) == 70
    text = f"node 1: the supervisor's {part} failed: RuntimeError: a fault of ours"
    assert decode_termination((tmp_path / "last-words").read_text()) == (
        ErrorKind.INTERNAL,
        text,
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ErrorKind.ENVIRONMENT),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            ErrorKind.ENVIRONMENT,
        ),
        (ValueError("a fault of ours"), ErrorKind.INTERNAL),
        (TimeoutError("a fault of ours"), ErrorKind.INTERNAL),
    ],
)
def test_an_error_of_the_worker_group_is_not_reported_as_a_broken_connection(
    tmp_path: Path, error: Exception, kind: ErrorKind
) -> None:
    def fail_to_start(go: Go) -> None:
        raise error

    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        scene.group.begin = fail_to_start
        peer.send(Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000))

    assert play(tmp_path, script) == 70
    said, text = decode_termination((tmp_path / "last-words").read_text())
    assert said is kind
    assert str(error) in text


def test_a_second_signal_ends_a_node_and_its_workers_at_once(
    tmp_path: Path,
) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        scene.group.place = Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000)
        os.kill(os.getpid(), signal.SIGTERM)
        await peer.receive(Leaving)
        assert not scene.group.was_notified("kill")
        os.kill(os.getpid(), signal.SIGINT)

    assert play(tmp_path, script) == 76


def test_a_draining_node_that_gets_no_leave_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_requests, "_ALONE_SECONDS", 0.0)

    async def script(scene: Scene) -> None:
        await scene.welcome()
        scene.group.place = Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000)
        scene.group.tick = scene.group.change = lambda *args, **kwargs: None
        os.kill(os.getpid(), signal.SIGTERM)

    assert play(tmp_path, script, grace_seconds=0.2) == 76

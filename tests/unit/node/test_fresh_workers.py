"""The group of fresh workers: it starts them when a group begins, ends them when it is left, and reports how
they ended."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from evergrad.node_state import LEASE_LOST
from evergrad_common.contract import ErrorKind
from evergrad_coordinator.protocol import Broken, Done, Finished, Go, Message, Result, Up
from evergrad_trainer.node import fresh
from evergrad_trainer.node.fresh import FreshWorkers, Stops
from evergrad_trainer.node.reports import NoWorkers, Report, WorkersLeft, WorkersReady
from evergrad_trainer.node.stragglers import Activity, Stragglers, observe_activity
from evergrad_trainer.node.worker_ends import decide_why
from evergrad_trainer.worker import channel

DONE, USER_ERROR, SAVED, UNSAVED = 0, 64, 75, 76


@dataclass
class FakeWorker:
    local_rank: int
    variables: Mapping[str, str]
    state: str = "starting"
    rank: int = -1
    inside_generation: int = -1
    failure: channel.Failed | None = None
    last_lines: Any = None
    signals: list[int] = field(default_factory=list)
    kills: int = 0
    was_killed: bool = False
    why_killed: str = ""
    printed_at: float = float("-inf")

    @property
    def pid(self) -> int:
        return 1000 + self.serial

    @property
    def serial(self) -> int:
        return self.local_rank

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.kills += 1

    def was_oom_killed(self) -> bool:
        return False


@dataclass
class Heard:
    """Stores the reports."""

    said: list[Any] = field(default_factory=list)

    def __call__(self, report: Report) -> None:
        match report:
            case WorkersReady():
                self.said.append(("ready", report.generation, report.workers, report.step))
            case Up():
                self.said.append(("up", report.generation))
            case WorkersLeft():
                self.said.append(("departed", report.is_saved))
            case NoWorkers():
                self.said.append(("gone", report.kind))
            case _:
                self.said.append(report)

    def take(self) -> list[Any]:
        said, self.said = self.said, []
        return said


class Scene:
    """A worker group of two workers, whose ends the test controls."""

    def __init__(self, *, can_stop: bool = False) -> None:
        self.heard = Heard()
        self.workers: list[FakeWorker] = []
        self.hung: list[Any] = []
        self.looked_at: list[int] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.group = FreshWorkers(
            self._start,  # type: ignore[arg-type]
            num_workers=2,
            report=self.heard,
            stops=Stops(lambda generation: can_stop, 30.0),
            call_later=lambda seconds, act: self.timers.append((seconds, act)),
            stragglers=Stragglers(
                limit_seconds=300.0, end=self.hung.append, observe=self._observe
            ),
        )
        self.group.start()

    def _observe(self, pid: int) -> Activity:
        self.looked_at.append(pid)
        return Activity(1.0, 0, waits_for_disk=False)

    def _start(
        self, local_rank: int, serial: int, variables: Mapping[str, str]
    ) -> FakeWorker:
        self.workers.append(FakeWorker(local_rank, variables))
        return self.workers[-1]

    def begin(
        self, generation: int = 1, first_rank: int = 2, world_size: int = 4
    ) -> list[FakeWorker]:
        if self.group._answered < generation:
            self.group.change(channel.WorkerPlan(generation, hard=False), cause="")
            assert self.heard.take() == [("ready", generation, 2, -1)]
        self.group.begin(Go(generation, first_rank, 2, world_size, 1, 2, "10.0.0.1", 1234))
        assert self.heard.take() == [("up", generation)]
        return self.workers[-2:]

    def end(self, worker: FakeWorker, code: int) -> list[Message]:
        self.group.end(worker, code)  # type: ignore[arg-type]
        return self.heard.take()


def test_workers_are_started_with_the_variables_of_torchrun() -> None:
    first, second = Scene().begin()
    assert first.variables["RANK"] == "2" and second.variables["RANK"] == "3"
    assert second.variables["LOCAL_RANK"] == "1"
    wanted = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
    assert wanted.items() <= first.variables.items()
    assert first.variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_a_node_is_done_if_all_its_workers_ended_successfully() -> None:
    scene = Scene()
    first, second = scene.begin(7)
    assert scene.end(first, DONE) == [Finished(7, 2)]
    assert scene.end(second, DONE) == [Finished(7, 3), Done(7)]


def test_a_worker_that_hangs_after_another_ended_successfully_is_killed_and_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, now = Scene(), 100.0
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now)
    first, second = scene.begin(7)
    now = 1000.0
    scene.group.tick()
    assert scene.hung == [], "nobody has ended yet"
    scene.end(first, DONE)
    scene.group.tick()
    now += 299.0
    scene.group.tick()
    assert scene.hung == []
    now += 2.0
    scene.group.tick()
    scene.group.tick()
    assert scene.hung == [second], "once"
    second.was_killed = True
    (report,) = scene.end(second, -9)
    assert isinstance(report, Broken) and (report.cause, report.rank) == ("stuck", 3)
    assert "stood still for 300 s" in report.message


def test_workers_are_watched_too_after_another_node_has_reported_an_end() -> None:
    scene = Scene()
    scene.begin(7)
    scene.group.expect_ends(6)
    scene.group.tick()
    assert scene.looked_at == []
    scene.group.expect_ends(7)
    scene.group.tick()
    assert scene.looked_at == [1000, 1001]


def test_a_worker_that_computes_transfers_prints_or_waits_for_a_disk_is_not_hanging() -> (
    None
):
    worker, hung = FakeWorker(0, {}), []
    activity = Activity(10.0, 0, waits_for_disk=False)
    stragglers = Stragglers(
        limit_seconds=300.0, end=hung.append, observe=lambda pid: activity
    )  # type: ignore[arg-type]

    def look(now: float) -> None:
        stragglers.end_hung([worker], now=now)  # type: ignore[list-item]

    look(0.0)
    activity = Activity(15.0, 0, waits_for_disk=False)
    look(299.0)
    activity = Activity(15.0, 1 << 20, waits_for_disk=False)
    look(598.0)
    worker.printed_at = 700.0
    look(897.0)
    activity = Activity(15.0, 1 << 20, waits_for_disk=True)
    look(1196.0)
    assert hung == []
    # Threads that wake up now and then do not count.
    activity = Activity(17.0, (1 << 20) + 1000, waits_for_disk=False)
    look(1495.0)
    activity = Activity(17.5, (1 << 20) + 2000, waits_for_disk=False)
    look(1497.0)
    assert hung == [worker]


def test_the_activity_of_a_process_includes_its_children() -> None:
    program = (
        "import subprocess, sys\n"
        "child = 'sum(range(3 * 10**7)); print(1, flush=True); input()'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        activity = observe_activity(process.pid)
        assert activity.cpu_seconds > 0.1 and activity.moved_bytes > 100_000
    finally:
        process.communicate(b"\n")
    assert observe_activity(process.pid) == Activity(0.0, 0, waits_for_disk=False)


def test_a_failing_worker_ends_its_siblings_and_is_the_cause() -> None:
    scene = Scene()
    first, second = scene.begin(3)
    second.failure = channel.Failed(
        -1, -1, 1, "ValueError", "no such label", is_final=False, is_agreed=False
    )
    (report,) = scene.end(second, 1)
    assert isinstance(report, Broken)
    assert (report.generation, report.cause, report.rank, report.exit_code) == (
        3,
        "user_error",
        3,
        1,
    )
    assert "no such label" in report.message
    assert first.signals == [signal.SIGTERM]
    assert scene.end(first, -15) == []
    scene.group.change(channel.WorkerPlan(4, hard=True), cause="")
    assert scene.heard.take() == [("ready", 4, 2, -1)]


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:6797."


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(ErrorKind.PEER, "peer_lost"), (ErrorKind.INTERNAL, "user_error")],
)
def test_an_error_reported_by_a_worker_keeps_its_kind(kind: ErrorKind, cause: str) -> None:
    scene = Scene()
    first, _ = scene.begin(world_size=4)
    first.failure = channel.Failed(
        -1, -1, 1, "RuntimeError", GLOO, is_final=False, is_agreed=False, kind=kind
    )
    (report,) = scene.end(first, 1)
    assert report.cause == cause  # type: ignore[attr-defined]


def test_a_lost_peer_is_recognised_in_the_output_of_a_typed_worker() -> None:
    scene = Scene()
    first, _ = scene.begin()
    first.last_lines = lambda: (
        "a line before\nerror: rank 2: the connection to another process was lost"
    )
    (report,) = scene.end(first, 70)
    assert report.cause == "peer_lost"  # type: ignore[attr-defined]


def test_a_worker_that_reports_a_user_error_ends_the_run() -> None:
    scene = Scene()
    first, _ = scene.begin()
    (report,) = scene.end(first, USER_ERROR)
    assert isinstance(report, Broken) and report.is_final


def test_a_run_that_stopped_itself_reports_the_weaker_exit_code() -> None:
    scene = Scene()
    first, second = scene.begin(5)
    scene.end(first, SAVED)
    assert scene.end(second, UNSAVED) == [Result(5, 0, UNSAVED, "stopped")]


def test_a_lost_lease_is_not_a_stop_requested_by_the_run() -> None:
    scene = Scene()
    first, second = scene.begin(5)
    (report,) = scene.end(first, LEASE_LOST)
    assert isinstance(report, Broken) and (report.cause, report.is_final) == (
        "peer_lost",
        False,
    )
    assert scene.end(second, LEASE_LOST) == [], "nothing is said of an end of the run"
    assert scene.group.place is None, (
        "nor is a place claimed in a group that this node has left"
    )
    scene.group.change(channel.WorkerPlan(6, hard=True), cause="")
    assert scene.heard.take() == [("ready", 6, 2, -1)]


@pytest.mark.parametrize(
    ("code", "was_asked", "why"),
    [
        (0, False, "done"),
        (0, True, "asked"),
        (75, False, "run_stop"),
        (76, False, "run_stop"),
        (75, True, "asked"),
        (-9, True, "asked"),
        (-9, False, "failed"),
        (64, False, "failed"),
        (LEASE_LOST, False, "lease_lost"),
        (LEASE_LOST, True, "asked"),
    ],
)
def test_the_cause_of_a_worker_end_depends_on_its_code_and_on_a_request(
    code: int, was_asked: bool, why: str
) -> None:
    assert decide_why(code, was_asked=was_asked) == why


def test_a_host_fault_is_retried_after_a_pause_and_then_left_to_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, now = Scene(), 100.0
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now)
    for generation in (1, 2, 3):
        first, second = scene.begin(generation)
        first.failure = channel.Failed(
            -1,
            -1,
            70,
            "VolumeError",
            "the volume is stale",
            is_final=True,
            is_agreed=True,
            kind=ErrorKind.ENVIRONMENT,
        )
        report, *rest = scene.end(first, 70)
        assert isinstance(report, Broken) and (report.cause, report.is_final) == (
            "environment",
            False,
        )
        if generation == 3:
            assert rest == [("gone", ErrorKind.ENVIRONMENT)]
            return
        assert rest == scene.end(second, -15) == []
        scene.group.change(channel.WorkerPlan(generation + 1, hard=True), cause="")
        scene.group.tick()
        assert scene.heard.take() == [], "it waits before it tries again"
        now += 2.0
        scene.group.tick()
        assert scene.heard.take() == [("ready", generation + 1, 2, -1)]


def test_a_soft_change_gives_workers_that_can_stop_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(can_stop=True)
    now = 100.0
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now)
    first, second = scene.begin()
    scene.group.change(channel.WorkerPlan(2, hard=False), cause="")
    assert first.signals == second.signals == [signal.SIGTERM]
    now = 129.0
    scene.group.tick()
    assert first.kills == 0
    assert scene.end(first, SAVED) == []
    assert scene.end(second, SAVED) == [("ready", 2, 2, -1)]


def test_a_hard_change_kills_workers_that_do_not_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(can_stop=True)
    now = 100.0
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now)
    first, second = scene.begin()
    scene.group.change(channel.WorkerPlan(2, hard=True), cause="")
    now = 101.0
    scene.group.tick()
    assert (first.kills, second.kills) == (1, 1)


def test_a_repeated_plan_is_answered_again() -> None:
    scene = Scene()
    scene.group.change(channel.WorkerPlan(2, hard=False), cause="")
    scene.group.change(channel.WorkerPlan(2, hard=False), cause="")
    assert scene.heard.take() == [("ready", 2, 2, -1)] * 2


@pytest.mark.parametrize(
    ("codes", "is_saved"), [((SAVED, SAVED), True), ((SAVED, -9), False)]
)
def test_a_drain_reports_whether_the_workers_saved(
    codes: tuple[int, int], is_saved: bool
) -> None:
    scene = Scene(can_stop=True)
    workers = scene.begin()
    scene.group.change(channel.WorkerPlan(2, hard=False), cause="")
    for worker, code in zip(workers, codes, strict=True):
        scene.end(worker, code)
    scene.group.depart(2, save=False)
    assert scene.heard.take()[-1] == ("departed", is_saved)


def test_nothing_is_started_or_answered_after_the_end_of_the_run() -> None:
    scene = Scene()
    first, second = scene.begin()
    scene.group.finish(70)
    assert first.signals == [signal.SIGTERM]
    assert scene.end(first, -15) == scene.end(second, -15) == []
    scene.group.change(channel.WorkerPlan(9, hard=True), cause="")
    assert scene.heard.take() == []
    assert scene.group.capacity == 0 and scene.group.is_empty


def test_workers_that_do_not_end_are_killed_at_their_deadline_and_not_at_a_later_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now)
    scene = Scene()
    first, second = scene.begin()
    scene.group.change(channel.WorkerPlan(2, hard=True), cause="")
    ((seconds, act),) = scene.timers
    assert seconds == pytest.approx(0.3)
    act()
    assert first.kills == second.kills == 0, "their time is not over"
    now += seconds + 0.001
    act()
    assert first.kills == second.kills == 1


def test_a_timer_of_an_older_group_kills_no_worker_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now)
    scene = Scene()
    workers = scene.begin()
    scene.group.change(channel.WorkerPlan(2, hard=True), cause="")
    for worker in workers:
        scene.end(worker, -15)
    successors = scene.begin(2)
    now += 1.0
    for _, act in scene.timers:
        act()
    assert [worker.kills for worker in successors] == [0, 0]

"""A worker group counts, requests and replaces its workers, and reports the results to the supervisor: fake
workers in, reports out."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_common.contract import ErrorKind
from evergrad_coordinator.protocol import Broken, Go
from evergrad_trainer.node import patience, worker_group
from evergrad_trainer.node.reports import Report
from evergrad_trainer.node.worker_group import InProcessWorkers, WorkerBounds
from evergrad_trainer.node.worker_starts import RESTART_SECONDS
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.worker import channel
from evergrad_trainer.worker.channel import Channel
from evergrad_trainer.worker.liveness import WorkerHeartbeat


@dataclass
class Sent:
    """A channel that stores its records."""

    records: list[Any] = field(default_factory=list)

    def send(self, record: Any, *, wait: bool = True) -> bool:
        assert not wait, "a supervisor never waits for a worker"
        if not isinstance(record, channel.WorkerPing):
            self.records.append(record)
        return True


class Reports:
    """Stores the reports: (kind, values), and the message of a broken group."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __call__(self, report: Report) -> None:
        values = (
            (report,)
            if isinstance(report, Broken | channel.WorkerResult | channel.Observed)
            else vars(report).values()
        )
        self.heard.append((type(report).__name__, *values))

    def take(self) -> list[tuple[Any, ...]]:
        """Return the reports since the last call."""
        heard, self.heard = self.heard, []
        return heard

    def take_broken(self) -> list[Broken]:
        return [one[1] for one in self.take() if one[0] == "Broken"]


@dataclass
class Room:
    """A worker group of two workers whose processes are fakes."""

    reports: Reports
    started: list[Worker]
    killed: list[int]
    group: InProcessWorkers

    def sent(self, worker: Worker) -> list[Any]:
        channel = cast(Sent, worker.channel)
        records, channel.records = channel.records, []
        return records

    def warm(self) -> tuple[Worker, Worker]:
        """Both workers warm, idle and nothing left to read."""
        self.group.start()
        for worker in self.started:
            self.group.hear(worker, channel.Warm())
        self.reports.take()
        first, second = self.started
        return first, second

    def begin(self, generation: int, step: int = -1) -> tuple[Worker, Worker]:
        """Both workers in the group of ``generation``, at ranks 2 and 3 of 4."""
        first, second = (
            self.warm() if not self.started else (self.started[0], self.started[1])
        )
        self.group.change(channel.WorkerPlan(generation, hard=False), cause="test")
        for worker in (first, second):
            self.group.hear(worker, channel.WorkerReady(generation, step))
        self.group.begin(go(generation))
        for worker in (first, second):
            self.group.hear(worker, channel.WorkerUp(generation, max(step, 0)))
            self.sent(worker)
        self.reports.take()
        return first, second


def go(generation: int, *, workers: int = 2) -> Go:
    return Go(generation, 2, workers, 4, 1, 2, "10.0.0.1", 4000)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(worker_group.time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def room(now: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    started: list[Worker] = []
    killed: list[int] = []
    monkeypatch.setattr(
        Worker,
        "kill",
        lambda self: (killed.append(self.serial), setattr(self, "was_killed", True)),
    )

    def start(local_rank: int, serial: int) -> Worker:
        process = SimpleNamespace(pid=100 + serial, exitcode=None)
        worker = Worker(
            local_rank,
            serial,
            cast(Any, process),
            cast(Channel, Sent()),
            WorkerHeartbeat(),
            None,
            last_heard=now[0],
            started_at=now[0],
        )
        started.append(worker)
        return worker

    reports = Reports()
    group = InProcessWorkers(
        start,
        num_workers=2,
        report=reports,
        describe_place=lambda step, slot: f"samples of {step}/{slot}",
        bounds=WorkerBounds(setup_seconds=5.0, timeout_seconds=300.0),
    )
    yield Room(reports, started, killed, group)


def test_workers_count_once_all_of_them_are_warm(room: Room) -> None:
    room.group.start()
    assert [worker.local_rank for worker in room.started] == [
        0,
        1,
    ] and room.group.capacity == 0
    room.group.hear(room.started[1], channel.Warm())
    assert room.group.capacity == 0 and room.reports.take() == []
    room.group.hear(room.started[0], channel.Warm())
    assert room.group.capacity == 2 and room.reports.take() == [("Capacity", 2)]


def test_a_node_whose_first_worker_cannot_start_counts_the_warm_ones(
    room: Room,
) -> None:
    room.group.start()
    room.group.hear(room.started[1], channel.Warm())
    room.group.end(room.started[0], -signal.SIGKILL)
    assert room.group.capacity == 1 and room.reports.take() == [("Capacity", 1)]


def test_a_worker_that_hangs_at_its_start_delays_its_node_for_a_bounded_time(
    room: Room, now: list[float]
) -> None:
    room.group.start()
    room.group.hear(room.started[0], channel.Warm())
    pass_seconds(room, now, 119)
    assert (room.reports.take(), room.group.capacity) == ([], 0)
    pass_seconds(room, now, 2)
    assert (room.reports.take(), room.group.capacity) == ([("Capacity", 1)], 1)
    assert room.killed == [2], "it is replaced"
    room.group.end(room.started[1], -signal.SIGKILL)
    pass_seconds(room, now, RESTART_SECONDS)
    room.group.hear(room.started[2], channel.Warm())
    assert room.reports.take() == [("Capacity", 2)]


def test_workers_that_repeatedly_hang_at_their_start_are_a_host_fault(
    room: Room, now: list[float]
) -> None:
    room.group.start()
    room.group.end(room.started[1], 1)
    room.reports.take()
    pass_seconds(room, now, 800)
    assert room.killed == []
    pass_seconds(room, now, 120)
    assert set(room.killed) == {1, 3}, "each once, and nobody else"
    for worker in (room.started[0], room.started[2]):
        room.group.end(worker, -signal.SIGKILL)
    (word,) = room.reports.take()
    assert word[0] == "NoWorkers" and word[2] is ErrorKind.ENVIRONMENT
    assert "hung in its start" in word[1]


def test_a_start_that_reads_a_state_may_last_as_long_as_the_reading(
    room: Room, now: list[float]
) -> None:
    room.group.start()
    room.group.hear(room.started[0], channel.Warm())
    for _ in range(4):
        pass_seconds(room, now, 100)
        room.started[1].heartbeat.move(10**9)
    pass_seconds(room, now, 119)
    assert room.killed == []
    # It is silence that is bounded, and 4 GB that stay 4 GB are silence.
    pass_seconds(room, now, 2)
    assert room.killed == [2]


def test_a_start_may_take_three_times_the_longest_successful_start(
    room: Room, now: list[float]
) -> None:
    room.group.start()
    pass_seconds(room, now, 100)
    room.group.hear(room.started[0], channel.Warm())
    pass_seconds(room, now, 299)
    assert room.killed == []
    pass_seconds(room, now, 2)
    assert room.killed == [2]


def test_a_node_that_waits_for_a_worker_offers_none_to_a_plan(room: Room) -> None:
    room.group.start()
    room.group.hear(room.started[0], channel.Warm())
    room.group.change(channel.WorkerPlan(5, hard=False), cause="test")
    room.group.hear(room.started[0], channel.WorkerReady(5, -1))
    assert room.reports.take() == [("WorkersReady", 5, 0, -1)]


def test_a_node_is_ready_when_its_slowest_worker_is_and_reports_its_newest_step(
    room: Room,
) -> None:
    first, second = room.warm()
    room.group.change(channel.WorkerPlan(5, hard=True), cause="node 2 lost")
    assert room.sent(first) == room.sent(second) == [channel.WorkerPlan(5, hard=True)]
    room.group.hear(first, channel.WorkerReady(5, 7))
    assert room.reports.take() == []
    room.group.hear(second, channel.WorkerReady(5, 8))
    assert room.reports.take() == [("WorkersReady", 5, 2, 8)]


def test_a_repeated_plan_is_answered_again_and_an_older_one_never(room: Room) -> None:
    first, second = room.warm()
    room.group.change(channel.WorkerPlan(5, hard=False), cause="")
    for worker in (first, second):
        room.group.hear(worker, channel.WorkerReady(5, 7))
    assert room.reports.take() == [("WorkersReady", 5, 2, 7)]
    room.group.change(channel.WorkerPlan(5, hard=False), cause="")
    assert room.reports.take() == [("WorkersReady", 5, 2, 7)]
    room.group.change(channel.WorkerPlan(4, hard=True), cause="")
    assert room.reports.take() == []


def test_state_transfer_to_workers_is_reported_while_it_grows_and_until_they_are_up(
    room: Room, now: list[float]
) -> None:
    first, second = room.warm()
    room.group.change(channel.WorkerPlan(5, hard=False), cause="test")
    for worker in (first, second):
        room.group.hear(worker, channel.WorkerReady(5, -1))
    room.group.begin(go(5))
    room.reports.take()
    first.heartbeat.move(1000)
    second.heartbeat.move(500)
    room.group.tick()
    room.group.tick()
    assert room.reports.take() == [("Restoring", 5, 1500)]
    first.heartbeat.move(1)
    for worker in (first, second):
        room.group.hear(worker, channel.WorkerUp(5, 0))
    room.group.tick()
    assert room.reports.take() == [("Up", 5, 0)]


def test_ranks_are_assigned_in_order_and_the_node_is_up_when_all_workers_are(
    room: Room,
) -> None:
    first, second = room.warm()
    room.group.change(
        channel.WorkerPlan(3, hard=False), cause="node_joined", detail="2 nodes connected"
    )
    for worker in (second, first):
        room.group.hear(worker, channel.WorkerReady(3, -1))
        room.sent(worker)
    room.reports.take()
    room.group.begin(go(3))
    assert room.group.place == go(3)
    for worker, rank in ((first, 2), (second, 3)):
        assert [*room.sent(worker)][-1:] == [
            channel.WorkerGo(
                3,
                rank,
                4,
                "10.0.0.1",
                4000,
                5.0,
                cause="node_joined",
                detail="2 nodes connected",
            )
        ]
    room.group.hear(first, channel.WorkerUp(3, 0))
    assert room.reports.take() == []
    room.group.hear(second, channel.WorkerUp(3, 0))
    assert room.reports.take() == [("Up", 3, 0)]


def test_a_worker_lost_between_ready_and_go_breaks_the_group_before_it_starts(
    room: Room,
) -> None:
    first, second = room.warm()
    room.group.change(channel.WorkerPlan(3, hard=False), cause="")
    for worker in (first, second):
        room.group.hear(worker, channel.WorkerReady(3, 4))
    room.group.end(second, -signal.SIGKILL)
    room.reports.take()
    room.group.begin(go(3))
    (broken,) = room.reports.take_broken()
    assert (broken.generation, broken.cause) == (3, "setup_failed")
    assert room.group.place is None


def test_a_killed_worker_is_reported_with_rank_and_samples_and_its_sibling_stays(
    room: Room, now: list[float]
) -> None:
    first, second = room.begin(3)
    second.heartbeat.beat(9, 4)
    room.group.end(second, -signal.SIGKILL)
    (broken,) = room.reports.take_broken()
    assert (broken.cause, broken.rank, broken.step, broken.exit_code, broken.is_final) == (
        "worker_crash",
        3,
        9,
        -9,
        False,
    )
    assert (
        broken.message
        == "was killed by SIGKILL in step 9, slot 4; its samples are samples of 9/4"
    )
    assert room.group.place is None, "a group without one of its ranks is not had any more"
    room.group.tick()
    assert len(room.started) == 2, "the others go on first"
    now[0] += RESTART_SECONDS
    room.group.tick()
    assert [worker.local_rank for worker in room.started] == [0, 1, 1]
    assert room.killed == [] and room.group.capacity == 1
    room.group.change(channel.WorkerPlan(4, hard=True), cause="")
    room.group.hear(first, channel.WorkerReady(4, 8))
    assert room.reports.take() == [("WorkersReady", 4, 1, 8)], (
        "the others do not wait for the one that starts"
    )


def test_a_node_without_a_warm_worker_answers_a_plan_too(room: Room) -> None:
    first, second = room.begin(3)
    for worker in (first, second):
        room.group.end(worker, -signal.SIGKILL)
    room.reports.take_broken()
    room.group.change(channel.WorkerPlan(4, hard=True), cause="")
    assert ("WorkersReady", 4, 0, -1) in room.reports.take(), (
        "the others need not wait for a new worker to hear that the old are gone"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with exit code 0 before the run was over"), (3, "exit code 3")],
)
def test_a_worker_that_exits_by_itself_during_training_is_a_crash(
    room: Room, code: int, words: str
) -> None:
    first, _ = room.begin(3)
    room.group.end(first, code)
    (broken,) = room.reports.take_broken()
    assert (
        broken.cause == "worker_crash"
        and words in broken.message
        and broken.exit_code == code
    )


def test_the_last_message_of_a_worker_is_the_message_of_its_end(room: Room) -> None:
    first, _ = room.begin(3)
    room.group.hear(
        first,
        channel.Failed(
            3, 6, 70, "ValueError", "a mistake", is_final=False, is_agreed=False
        ),
    )
    room.group.end(first, 70)
    (broken,) = room.reports.take_broken()
    assert (broken.cause, broken.message, broken.is_final) == (
        "user_error",
        "ValueError: a mistake",
        False,
    )


@pytest.mark.parametrize(("is_final", "is_agreed"), [(True, False), (False, True)])
def test_a_failure_that_no_retry_can_resolve_is_final(
    room: Room, is_final: bool, is_agreed: bool
) -> None:
    first, _ = room.begin(3)
    room.group.hear(
        first,
        channel.Failed(
            3, 6, 64, "InputError", "wrong", is_final=is_final, is_agreed=is_agreed
        ),
    )
    room.group.end(first, 64)
    assert [broken.is_final for broken in room.reports.take_broken()] == [True]


def test_a_worker_that_lost_a_peer_reports_it_and_survives(room: Room) -> None:
    first, _ = room.begin(3)
    room.group.hear(first, channel.WorkerBroken(3, 6, "Connection closed by peer"))
    (broken,) = room.reports.take_broken()
    assert (broken.cause, broken.rank, broken.step, broken.generation) == (
        "peer_lost",
        2,
        6,
        3,
    )
    assert len(room.started) == 2 and room.killed == []


def test_a_silent_worker_is_killed_but_not_if_the_node_itself_was_suspended(
    room: Room, now: list[float]
) -> None:
    first, second = room.begin(3)
    now[0] += 60.0
    room.group.tick()
    assert room.killed == [], "after a freeze of the supervisor everybody seems silent"
    for _ in range(25):
        now[0] += patience.PING_SECONDS
        room.group.hear(second, channel.WorkerPong())
        room.group.tick()
    assert set(room.killed) == {first.serial}
    room.group.end(first, -signal.SIGKILL)
    (broken,) = room.reports.take_broken()
    assert broken.cause == "stuck"


def pass_seconds(room: Room, now: list[float], seconds: float) -> None:
    """Time passes in which all workers give signs of life."""
    for _ in range(round(seconds / patience.PING_SECONDS)):
        now[0] += patience.PING_SECONDS
        for worker in room.started:
            room.group.hear(worker, channel.WorkerPong())
        room.group.tick()


def test_a_worker_has_three_of_its_longest_slots_to_leave_a_dead_group(
    room: Room, now: list[float]
) -> None:
    first, second = room.begin(3)
    second.heartbeat._values[3] = 20.0
    room.group.change(channel.WorkerPlan(4, hard=True), cause="")
    pass_seconds(room, now, patience.STUCK_SECONDS)
    assert room.killed == []
    pass_seconds(room, now, 1)
    assert set(room.killed) == {first.serial}
    pass_seconds(room, now, 60 - patience.STUCK_SECONDS)
    assert set(room.killed) == {first.serial, second.serial}


def test_of_workers_that_hang_together_rank_0_is_killed_last(
    room: Room, now: list[float]
) -> None:
    """By then its node has received whether another node holds the state."""
    first, second = room.begin(3)
    first.rank = 0
    room.group.change(channel.WorkerPlan(4, hard=True), cause="")
    pass_seconds(room, now, patience.STUCK_SECONDS + 1)
    assert set(room.killed) == {second.serial}
    room.group.change(channel.WorkerPlan(5, hard=True), cause="", is_only_holder=True)
    pass_seconds(room, now, 100)
    assert set(room.killed) == {second.serial}


def test_the_only_holder_of_the_state_has_the_whole_collective_timeout(
    room: Room, now: list[float]
) -> None:
    first, second = room.begin(3)
    room.group.change(channel.WorkerPlan(4, hard=True), cause="", is_only_holder=True)
    pass_seconds(room, now, 300)
    assert room.killed == []
    pass_seconds(room, now, 1)
    assert set(room.killed) == {first.serial, second.serial}


def test_a_worker_whose_first_slot_still_runs_on_its_device_is_not_hanging(
    room: Room, now: list[float]
) -> None:
    """How long its slots take is not known: the queue of an accelerator may hold minutes of work."""
    first, second = room.begin(3)
    second.heartbeat.beat(1, 0)
    room.group.change(channel.WorkerPlan(4, hard=True), cause="")
    pass_seconds(room, now, 300)
    assert set(room.killed) == {first.serial}
    pass_seconds(room, now, 1)
    assert set(room.killed) == {first.serial, second.serial}


def test_a_soft_change_never_kills_a_worker(room: Room, now: list[float]) -> None:
    room.begin(3)
    room.group.change(channel.WorkerPlan(4, hard=False), cause="")
    pass_seconds(room, now, 200)
    assert room.killed == []


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_worker_with_the_newest_state_saves_and_its_report_counts(
    room: Room, is_saved: bool
) -> None:
    first, second = room.warm()
    room.group.change(channel.WorkerPlan(4, hard=False), cause="")
    room.group.hear(first, channel.WorkerReady(4, 6))
    room.group.hear(second, channel.WorkerReady(4, 7))
    for worker in (first, second):
        room.sent(worker)
    room.reports.take()
    room.group.depart(4, save=True)
    assert room.sent(first) == [channel.WorkerLeave(4, save=False)] and room.sent(
        second
    ) == [channel.WorkerLeave(4, save=True)]
    room.group.hear(first, channel.WorkerLeft(True))
    room.group.hear(second, channel.WorkerLeft(is_saved))
    room.group.end(first, 75)
    assert room.reports.take() == []
    room.group.end(second, 75)
    assert room.reports.take() == [("WorkersLeft", is_saved)]


def test_a_saving_worker_that_dies_has_not_saved(room: Room) -> None:
    first, second = room.warm()
    room.group.depart(4, save=True)
    room.group.hear(second, channel.WorkerLeft(True))
    room.group.end(first, -signal.SIGKILL)
    room.group.end(second, 75)
    assert room.reports.take() == [("WorkersLeft", False)]


def test_leaving_without_a_save_is_not_a_failure(room: Room) -> None:
    first, second = room.warm()
    room.group.depart(4, save=False)
    for worker in (first, second):
        room.group.hear(worker, channel.WorkerLeft(True))
        room.group.end(worker, 75)
    assert room.reports.take() == [("WorkersLeft", True)]
    assert len(room.started) == 2, "nobody is started while the node ends"


def test_workers_that_end_before_they_are_warm_are_retried_a_few_times(
    room: Room, now: list[float]
) -> None:
    room.group.start()
    for _ in range(2):
        room.group.end(room.started[-1], 70)
        now[0] += 1.0
        room.group.tick()
    last = room.started[-1]
    room.group.hear(
        last,
        channel.Failed(
            -1, -1, 70, "ImportError", "no such module", is_final=False, is_agreed=False
        ),
    )
    room.group.end(last, 70)
    assert len(room.started) == 4
    ((name, message, kind, exit_code, _),) = room.reports.take()
    assert (
        name == "NoWorkers"
        and "3 workers in a row" in message
        and "no such module" in message
    )
    assert (kind, exit_code) == (ErrorKind.INTERNAL, 70)


def fail_of_input(room: Room, worker: Worker) -> None:
    """The worker ends before it is warm, because of what a person wrote."""
    words = channel.Failed(
        -1,
        -1,
        64,
        "TaskInputError",
        "mine.py:3: no w",
        is_final=True,
        is_agreed=False,
        kind=ErrorKind.INPUT,
    )
    room.group.hear(worker, words)
    room.group.end(worker, 64)


def test_a_user_error_at_the_first_start_ends_the_node_as_such(
    room: Room, now: list[float]
) -> None:
    room.group.start()
    fail_of_input(room, room.started[0])
    (report,) = [one for one in room.reports.take() if one[0] == "NoWorkers"]
    assert report[1:] == ("TaskInputError: mine.py:3: no w", ErrorKind.INPUT, 64, "")
    now[0] += 60.0
    room.group.tick()
    assert len(room.started) == 2


def test_a_training_node_does_not_end_by_a_user_error_of_a_replaced_worker(
    room: Room, now: list[float]
) -> None:
    first, _ = room.begin(3)
    room.group.end(first, -9)
    for _ in range(3):
        assert not [one for one in room.reports.take() if one[0] == "NoWorkers"]
        now[0] += 10.0
        room.group.tick()
        fail_of_input(room, room.started[-1])
    ((_, message, _, exit_code, _),) = [
        one for one in room.reports.take() if one[0] == "NoWorkers"
    ]
    assert "3 workers in a row" in message and exit_code == 70


def fail_of_environment(room: Room, worker: Worker, step: int) -> None:
    """The worker ends because a volume is unavailable, an error of all ranks."""
    worker.state, worker.inside_generation, worker.heartbeat._values[0] = "inside", 3, step
    room.group.hear(
        worker,
        channel.Failed(
            3,
            step,
            70,
            "VolumeError",
            "stale",
            is_final=False,
            is_agreed=True,
            kind=ErrorKind.ENVIRONMENT,
        ),
    )
    room.group.end(worker, 70)


def test_a_worker_with_host_faults_is_replaced_a_few_times_and_then_left_to_another_host(
    room: Room, now: list[float]
) -> None:
    worker, _ = room.begin(3)
    for _ in range(2):
        fail_of_environment(room, worker, step=6)
        (broken,) = room.reports.take_broken()
        assert (broken.cause, broken.is_final) == ("environment", False)
        now[0] += 10.0
        room.group.tick()
        worker = room.started[-1]
    fail_of_environment(room, worker, step=6)
    ((_, message, kind, _, _),) = [
        one for one in room.reports.take() if one[0] == "NoWorkers"
    ]
    assert "stale" in message and kind is ErrorKind.ENVIRONMENT


def test_a_host_that_makes_progress_between_failures_is_not_given_up(
    room: Room, now: list[float]
) -> None:
    worker, _ = room.begin(3)
    for step in range(6):
        fail_of_environment(room, worker, step=step)
        now[0] += 10.0
        room.group.tick()
        worker = room.started[-1]
    assert not [one for one in room.reports.take() if one[0] == "NoWorkers"]

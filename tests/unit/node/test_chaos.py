"""Chaos: the plan follows from its seed, the last replica is spared, no process stays frozen, and a node that
left returns."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import cast

import pytest
from patience import PATIENCE

from evergrad_chaos.nodes import DisturbedNodes
from evergrad_chaos.plan import choose_victim, plan_events
from evergrad_chaos.tally import ChaosTally, count_repeated, describe_tally
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.reading.loader import LoadedManifest
from evergrad_trainer.commands.chaos import load_chaos
from evergrad_trainer.commands.run import RunRequest, check_request_of_script
from evergrad_trainer.node.local import fetch_status

EVENTS = 600


def test_each_seed_has_its_own_reproducible_plan() -> None:
    one, again, other = (list(islice(plan_events(seed), 50)) for seed in (7, 7, 8))
    assert one == again
    assert one != other


def test_a_plan_has_all_kinds_and_most_events_are_single() -> None:
    events = list(islice(plan_events(3), EVENTS))
    kinds = {one.kind for event in events for one in event.disturbances}
    assert kinds == {
        "kill_node", "kill_worker", "freeze_node", "freeze_supervisor", "freeze_worker",
        "leave", "join", "kill_coordinator", "lose_all",
    }  # fmt: skip
    pairs = [event for event in events if len(event.disturbances) == 2]
    assert EVENTS / 10 < len(pairs) < EVENTS / 2
    assert {len(event.disturbances) for event in events} == {1, 2}
    assert {event.awaits_all for event in events} == {True, False}


@pytest.mark.parametrize(
    ("kind", "only"), [("transfer", "starve"), ("coordinator", "kill_coordinator")]
)
def test_a_plan_of_one_kind_has_one_disturbance_at_a_time(kind: str, only: str) -> None:
    events = list(islice(plan_events(3, kind), 50))
    assert {one.kind for event in events for one in event.disturbances} == {only}
    assert all(len(event.disturbances) == 1 and event.awaits_all for event in events)
    assert (
        events
        == list(islice(plan_events(3, kind), 50))
        != list(islice(plan_events(4, kind), 50))
    )


def test_all_nodes_are_lost_rarely_and_never_in_combination() -> None:
    events = [
        event
        for event in islice(plan_events(4), EVENTS)
        if any(one.kind == "lose_all" for one in event.disturbances)
    ]
    assert 0 < len(events) < EVENTS / 20
    assert {len(event.disturbances) for event in events} == {1}


def test_freezes_are_shorter_and_longer_than_the_silence_that_counts_as_a_loss() -> None:
    disturbances = [
        one for event in islice(plan_events(5), EVENTS) for one in event.disturbances
    ]
    lengths = [one.seconds for one in disturbances if one.kind.startswith("freeze")]
    assert 1.0 <= min(lengths) < 3.0 < max(lengths) <= 6.0
    assert {one.seconds for one in disturbances if not one.kind.startswith("freeze")} == {
        0.0
    }


@pytest.mark.parametrize("pick", [0.0, 0.3, 0.999, 1.0])
def test_the_last_node_with_the_state_is_spared(pick: float) -> None:
    alive = {0: 100, 1: 101, 2: 102}
    assert choose_victim(pick, alive, {101}) in (0, 2)
    assert choose_victim(pick, {1: 101}, {101}) is None
    assert choose_victim(pick, {}, set()) is None
    assert choose_victim(pick, alive, set()) is None, "nobody is known to hold the state"


def test_every_node_can_be_chosen_while_others_hold_the_state() -> None:
    alive = {0: 100, 2: 102, 3: 103}
    assert {choose_victim(pick / 10, alive, {100, 102, 103}) for pick in range(11)} == {
        0,
        2,
        3,
    }


def test_repeated_steps_are_counted_from_the_rows(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert count_repeated(metrics) == 0
    metrics.write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 2, 3, 4, 4, 5))
    )
    assert count_repeated(metrics) == 3


def test_lost_seconds_continue_after_the_counting_coordinator_is_gone() -> None:
    tally = ChaosTally()
    tally.note_status({"generation": 4, "lostSeconds": {"node_lost": 1.5}})
    tally.end_coordinator()
    tally.note_status(
        {"generation": 3, "lostSeconds": {"node_lost": 0.25, "worker_crash": 2.0}}
    )
    assert tally.total_lost() == {"node_lost": 1.75, "worker_crash": 2.0}
    assert tally.generation == 4


def test_the_summary_names_events_generations_and_causes() -> None:
    tally = ChaosTally(
        num_events=3,
        generation=9,
        kinds={"kill_node": 2, "join": 1},
        lost_seconds={"node_lost": 0.32},
    )
    assert describe_tally(tally, repeated=0) == (
        "chaos: 3 events (1 join, 2 kill node), generation 9, steps repeated: 0, longest recovery 0.0 s, "
        "seconds lost by cause: node lost 0.3"
    )


def test_a_coordinator_that_does_not_respond_has_no_status() -> None:
    assert fetch_status(1, "token") is None


def test_chaos_for_a_script_is_refused_because_its_steps_are_unknown() -> None:
    request = RunRequest(cast(LoadedManifest, None), Path("runs/r"))
    check_request_of_script(request)
    with pytest.raises(ConfigurationError, match="--chaos"):
        check_request_of_script(dataclasses.replace(request, chaos_seed=7))


def test_chaos_without_its_package_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_chaos() is sys.modules["evergrad_chaos.disturb"]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [])
    with pytest.raises(ConfigurationError, match=r"--chaos: needs .* pip install \./chaos"):
        load_chaos()


# ---- real processes ----------------------------------------------------------------------------------------


def sleep_forever(index: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    while True:
        signal.pause()


@pytest.fixture
def nodes() -> Iterator[DisturbedNodes]:
    """Two processes that do nothing but leave when they are asked to."""
    started = DisturbedNodes(sleep_forever, 2)
    started.start()
    yield started
    started.close()


def state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "gone"


def poll_until(nodes: DisturbedNodes, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        nodes.poll()
        time.sleep(0.005)


def test_a_frozen_process_resumes_by_itself(nodes: DisturbedNodes) -> None:
    pid = nodes.alive()[1]
    nodes.freeze([pid], seconds=1.0)
    poll_until(nodes, lambda: state(pid) == "T")
    poll_until(nodes, lambda: state(pid) == "S")
    assert nodes.frozen == {}


def test_a_signal_for_all_reaches_frozen_nodes_too(nodes: DisturbedNodes) -> None:
    nodes.is_replacing = False
    wait_for_handlers(nodes)
    nodes.freeze(list(nodes.alive().values()), seconds=1000)
    nodes.signal(signal.SIGTERM)
    poll_until(nodes, lambda: nodes.ended == {0: 75, 1: 75})
    assert nodes.frozen == {}


def test_a_node_that_was_asked_to_drain_is_restarted(nodes: DisturbedNodes) -> None:
    wait_for_handlers(nodes)
    pid = nodes.alive()[1]
    nodes.away.add(1)
    assert 1 not in nodes.alive()
    os.kill(pid, signal.SIGTERM)
    poll_until(nodes, lambda: nodes.alive().get(1, pid) != pid)
    assert nodes.ended == {} and nodes.away == set()


def test_a_node_killed_during_its_drain_is_replaced_and_counts_as_returned(
    nodes: DisturbedNodes,
) -> None:
    first = nodes.alive()[0]
    os.kill(first, signal.SIGKILL)
    nodes.away.add(0)
    poll_until(nodes, lambda: nodes.alive().get(0, first) != first)
    assert nodes.away == set()


def test_a_surplus_node_leaves_permanently(nodes: DisturbedNodes) -> None:
    nodes.start_node(2)
    wait_for_handlers(nodes)
    pid = nodes.alive()[2]
    nodes.away.add(2)
    os.kill(pid, signal.SIGTERM)
    poll_until(nodes, lambda: 2 not in nodes.nodes)
    assert nodes.ended == {} and set(nodes.alive()) == {0, 1}


def test_workers_are_the_children_of_their_node(nodes: DisturbedNodes) -> None:
    assert nodes.workers(0) == []


def wait_for_handlers(nodes: DisturbedNodes) -> None:
    """Until all nodes would leave when asked."""

    def catches(pid: int) -> bool:
        line = next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("SigCgt")
        )
        return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    poll_until(nodes, lambda: all(catches(pid) for pid in nodes.alive().values()))

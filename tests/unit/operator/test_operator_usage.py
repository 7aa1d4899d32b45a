"""How the time of a run's pods was used: each millisecond counts once, for any sequence of events."""

import json
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from simulated_run import CONFIG, Simulation, make_run

from evergrad_common.causes import OFF_HOST, USES, Use
from evergrad_operator.core.objects.status_codec import decode
from evergrad_operator.core.observe.facts import read_runs
from evergrad_operator.core.observe.memory import Memory, build_memory, parse_memory
from evergrad_operator.core.observe.time_accounting import (
    PodLife,
    PodTimeAccount,
    Price,
    Reading,
    count,
    show_usage,
)
from evergrad_operator.edge.metrics.operator_metrics import FactsCollector, RunFactsSource

SECOND = 1000


@dataclass(frozen=True)
class Known:
    """A pod with its real times, and the delay until its end is observed."""

    life: PodLife
    seen_after: int


@st.composite
def pods(draw: st.DrawFn) -> Known:
    created = draw(st.integers(0, 50_000))
    bound = created + draw(st.integers(0, 9_000))
    joined = bound + draw(st.integers(0, 9_000))
    ended = created + draw(st.integers(0, 60_000))
    name = f"{draw(st.integers(0, 99))}-{draw(st.integers(0, 9))}"
    life = PodLife(
        name=draw(st.sampled_from([name, f"evaluate-{created}-0"])),
        created=created,
        bound=draw(st.sampled_from([None, bound])),
        joined=draw(st.sampled_from([None, joined])),
        ended=ended,
        use=draw(st.sampled_from(["startup", "evaluation"])),
        num_accelerators=draw(st.sampled_from([0, 1, 8])),
    )
    return Known(life, draw(st.integers(0, 5_000)))


def look(known: list[Known], now: int) -> list[PodLife]:
    """The pods as a pass observes them."""
    lives = [one.life for one in known if one.life.created <= now]
    after = {one.life.name: one.seen_after for one in known}
    return [
        life
        if life.ended is not None and life.ended + after[life.name] <= now
        else replace(life, ended=None)
        for life in lives
    ]


def written(usage: PodTimeAccount) -> PodTimeAccount:
    """As another operator reads it from the status."""
    attempts = tuple(index % 7 for index in range(100))
    return parse_memory(build_memory(Memory(usage=usage, attempts=attempts))).usage


def read_texts(**texts: str) -> PodTimeAccount:
    return decode(PodTimeAccount, {"memory": texts})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(pods(), max_size=6, unique_by=lambda one: one.life.name),
    st.lists(st.tuples(st.integers(1, 9_000), st.booleans()), max_size=30),
    st.lists(st.tuples(st.sampled_from(sorted(USES)), st.integers(0, 9_000)), max_size=30),
)
def test_the_accounted_times_sum_to_the_lifetimes_of_the_pods(
    known: list[Known], passes: list[tuple[int, bool]], growth: list[tuple[Any, int]]
) -> None:
    now, usage, attempt = 1, PodTimeAccount(), 0
    counters: dict[Use, int] = {}
    for index, (pause, is_lost) in enumerate(passes):
        now += pause
        if index < len(growth):
            use, more = growth[index]
            counters[use] = counters.get(use, 0) + more
        # Occasionally another coordinator counts from 0.
        if index % 7 == 6:
            attempt, counters = attempt + 1, {}
        reading = Reading(attempt, dict(counters)) if index % 3 else None
        counted = count(usage, look(known, now), now=now, reading=reading)
        # A status that was not written is counted again by the next pass.
        usage = usage if is_lost else written(counted)
        assert all(amount >= 0 for amount in usage.pods.values())

    lives = [one.life for one in known]
    usage = written(count(usage, lives, now=200_000, reading=None, fallback="end"))
    assert usage.pod_milliseconds + usage.pending[0] == sum(
        life.ended - life.created for life in lives if life.ended is not None
    )
    assert usage.pending[0] == 0
    assert set(usage.pods) <= set(USES)
    # Repeat: time that was counted does not count again.
    assert count(usage, lives, now=300_000, reading=None, fallback="end") == usage


def test_a_pod_is_queued_then_starting_then_in_the_state_that_its_coordinator_reports() -> (
    None
):
    life = PodLife("0-0", 10_000, bound=12_000, joined=17_000, num_accelerators=8)
    usage = count(PodTimeAccount(), [life], now=20_000, reading=None)
    assert usage.pods == {OFF_HOST: 2_000, "startup": 5_000}
    assert usage.accelerators == {"startup": 40_000}
    assert usage.pending == (3_000, 24_000)

    reading = Reading(0, {"training": 2_000, "saving": 1_000})
    usage = count(usage, [life], now=20_000, reading=reading)
    assert usage.pods == {
        OFF_HOST: 2_000,
        "startup": 5_000,
        "training": 2_000,
        "saving": 1_000,
    }
    assert usage.accelerators["training"] == 16_000
    assert usage.wasted == 5 / 8

    # The same response again changes nothing.
    usage = count(usage, [life], now=25_000, reading=reading)
    assert usage.pending == (5_000, 40_000)
    usage = count(usage, [life], now=25_000, reading=Reading(0, {"training": 7_000}))
    assert usage.pods["training"] == 7_000


def test_time_after_an_end_that_is_observed_late_is_subtracted() -> None:
    life = PodLife("0-0", 0, bound=0, joined=0)
    other = PodLife("1-0", 0, bound=0, joined=0)
    usage = count(
        PodTimeAccount(),
        [life, other],
        now=10_000,
        reading=Reading(0, {"training": 20_000}),
    )
    assert usage.pods == {"training": 20_000}
    ended = replace(life, ended=7_000)
    usage = count(
        usage, [ended, other], now=11_000, reading=Reading(0, {"training": 21_000})
    )
    # No total decreases: the time of the other pod compensates first.
    assert usage.pods == {"training": 20_000} and usage.pending == (-2_000, 0)
    usage = count(
        usage, [ended, other], now=15_000, reading=Reading(0, {"training": 25_000})
    )
    assert usage.pods == {"training": 22_000} and usage.pending == (0, 0)


def test_an_unobserved_end_of_a_pod_is_counted_at_its_last_observation() -> None:
    life = PodLife("0-0", 0, bound=0)
    usage = count(PodTimeAccount(), [life], now=10_000, reading=None)
    assert count(usage, [], now=60_000, reading=None).pods == {"startup": 10_000}


def test_names_are_packed_by_attempt_and_read_back() -> None:
    usage = PodTimeAccount(
        at=5,
        pods={"training": 7},
        open=frozenset(f"{index}-0" for index in range(1000)) | {"prepare-1"},
        joined=frozenset(f"{index}-0" for index in range(500)),
        closed=frozenset({"3-2", "1001-0", "evaluate-100-4"}),
    )
    # Node 3 has a newer attempt than the open one.
    status = build_memory(Memory(usage=usage, attempts=(0, 0, 0, 2, *[0] * 998)))
    texts = status["memory"]
    assert texts["usagePods"] == "j3cj496o500-c o:prepare-1 j:0/3 c:evaluate-100-4"
    assert parse_memory(status).usage == usage
    assert "usagePods" not in build_memory(Memory(attempts=(0, 1)))["memory"]
    assert (
        read_texts()
        == PodTimeAccount()
        == read_texts(usage="[", usagePods="x y:z")
        == read_texts(usage="7")
    )
    few = read_texts(usage=texts["usage"], usagePods="c99999 o:5/0-99999", attempts="0,1")
    assert few.closed == {"0-0", "1-1"}


def test_cost_is_computed_from_the_time_on_hosts() -> None:
    hour = 3600 * SECOND
    usage = PodTimeAccount(
        at=1,
        pods={"training": 3 * hour, OFF_HOST: hour, "startup": hour},
        accelerators={"training": 24 * hour, "startup": 8 * hour},
    )
    assert show_usage(usage, Price(2.5, 0.1, "EUR")) == {
        "podHours": "5.00",
        "gpuHours": "32.00",
        "waste": "25%",
        "cost": "80.40 EUR",
        "byCause": {"training": 10800, "startup": 3600, "queue": 3600},
    }
    assert show_usage(usage, Price())["cost"] is None
    assert show_usage(PodTimeAccount(), Price(2.5)) == {}


# ---- a whole run
# ---------------------------------------------------------------------------------------------


def test_pod_times_are_complete_across_kills_and_operator_restarts() -> None:
    world = Simulation().run(10)
    used = 0
    for index in range(24):
        world.age(7.0)
        used += 21_000
        live = world.live()
        victim, kind = (live[index % len(live)], index % 4) if live else ("", 3)
        if kind == 0:
            world.end(victim, 137)
        elif kind == 1:
            world.delete(victim)
            world.age(2.0)
            world.leave()
        elif kind == 2:
            world.vanish(victim)
        world.train(
            10 + index, usage={"milliseconds": {"training": used, "recovery": index}}
        )
        world.reconcile(is_status_lost=index % 5 == 0)
        world.start()
        world.train(
            10 + index, usage={"milliseconds": {"training": used, "recovery": index}}
        )
        world.reconcile()
    assert world.counted() == world.lifetime()
    shown = world.status["usage"]
    assert abs(sum(shown["byCause"].values()) - world.lifetime() / 1000) <= 10
    assert len(json.dumps(world.status)) < 16 * 1024


def test_an_ended_run_writes_nothing() -> None:
    world = Simulation().run(10)
    world.set_spec(suspend=True)
    world.settle()
    world.leave()
    world.settle()
    writes = world.writes
    world.age(1000.0)
    world.settle()
    assert world.writes == writes


def test_time_is_exported_with_the_name_and_labels_of_the_run() -> None:
    run = make_run(
        resources={"limits": {"nvidia.com/gpu": "8"}, "requests": {}}, workersPerNode=1
    )
    run["metadata"]["labels"] = {"team": "lm", "cost/center": "7"}
    world = Simulation(
        run, config=replace(CONFIG, propagated_labels=("team",), price_gpu_hour=2.0)
    ).run(10)
    world.age(3600.0)
    world.train(20)
    world.reconcile()
    key = (world.raw["metadata"]["namespace"], world.raw["metadata"]["name"])
    facts = RunFactsSource(
        0, 0.0, 0, {}, {}, {}, read_runs({key: world.raw}, now=world.now)
    )
    collector = FactsCollector(facts, labels=("team", "cost/center"))
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    place = 'run="docs-lm",run_namespace="team"'
    assert (
        f'evergrad_operator_run_pod_seconds_total{{cause="training",{place}}} 10800.0'
        in text
    )
    assert (
        f'evergrad_operator_run_gpu_seconds_total{{cause="training",{place}}} 86400.0'
        in text
    )
    assert (
        f'evergrad_operator_run_labels{{label_cost_center="7",label_team="lm",{place}}} 1.0'
        in text
    )
    # A counter does not decrease when time is given back, and is removed with its run.
    [one] = facts.runs
    less = replace(one, usage=PodTimeAccount(at=1, pods={"training": 10_799_000}))
    collector.facts = replace(facts, runs=(less,))
    assert (
        f'pod_seconds_total{{cause="training",{place}}} 10800.0'
        in generate_latest(registry).decode()
    )
    collector.facts = replace(facts, runs=())
    assert "docs-lm" not in generate_latest(registry).decode()
    # Pods, volume and all other objects have the labels that are passed on, and no others.
    children = [*world.pods.values(), *world.children.values()]
    assert all(one["metadata"]["labels"]["team"] == "lm" for one in children)
    assert not any("cost/center" in one["metadata"]["labels"] for one in children)


def test_a_run_recreated_between_two_scrapes_counts_from_its_own_start() -> None:
    def facts(uid: str, hours: int) -> RunFactsSource:
        usage = PodTimeAccount(at=1, pods={"training": hours * 3600 * SECOND})
        raw = {"metadata": {"uid": uid}, "status": build_memory(Memory(usage=usage))}
        return RunFactsSource(
            0, 0.0, 0, {}, {}, {}, read_runs({("team", "x"): raw}, now=0.0)
        )

    collector = FactsCollector(facts("old", 100))
    registry = CollectorRegistry()
    registry.register(collector)
    sample = 'pod_seconds_total{cause="training",run="x",run_namespace="team"}'
    assert f"{sample} 360000.0" in generate_latest(registry).decode()
    collector.facts = facts("new", 1)
    # For Prometheus this is a reset: all the time of the new run is added.
    assert f"{sample} 3600.0" in generate_latest(registry).decode()


def test_the_time_before_a_host_is_assigned_is_no_accelerator_time() -> None:
    world = Simulation(
        make_run(resources={"limits": {"nvidia.com/gpu": "2"}, "requests": {}})
    )
    world.reconcile()
    world.age(100.0)
    world.unschedulable("docs-lm-0-0", "no room")
    world.reconcile()
    usage = parse_memory(world.status).usage
    assert usage.pods == {OFF_HOST: 300_000} and not usage.accelerators

"""Statuses, annotations and labels that a user has damaged affect neither their run nor another run."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from fake_kubernetes.simulation import KEY, Simulation, make_trained
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from simulated_run import make_run as make_docs_run
from status_schema import problems_with, status_schema

from evergrad_operator.core.fleet import build_fleet
from evergrad_operator.core.objects.times import format_time, parse_time
from evergrad_operator.core.observe.facts import count_phases, read_runs
from evergrad_operator.core.observe.memory import build_memory, parse_hosts, parse_memory
from evergrad_operator.core.observe.observe import build_record, observe
from evergrad_operator.core.observe.pods import parse_pod
from evergrad_operator.core.observe.spec import parse_run
from evergrad_operator.core.status.events import derive_events
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.host_index import HostIndex
from evergrad_operator.edge.cache.store import CHILDREN, CLAIMS, PODS, RUNS
from evergrad_operator.edge.metrics.operator_metrics import FactsCollector, RunFactsSource

# ---- unusual values
# -----------------------------------------------------------------------------------------

TIMES = (
    "9999-12-31T23:59:59-12:00",
    "9999-12-31T23:59:59Z",
    "9999-12-31T24:00:00Z",
    "0001-01-01T00:00:00+12:00",
    "0001-01-01T00:00:00Z",
    "1969-12-31T23:59:59.999999Z",
    "2026-01-01T00:00:00",
    "2026-02-30T00:00:00Z",
)
NUMBERS = (0, -1, 2**31, 2**53 + 1, 2**63, 10**9, 10**15, 10**400, -(10**400))
FLOATS = (float("inf"), float("-inf"), float("nan"), 1e300, -1e300, 1e15, 0.5)
TEXTS = (
    "",
    "9" * 5000,
    "-" + "9" * 400,
    "9" * 5000 + "-5",
    "5-" + "9" * 5000,
    "0x" + "9" * 5000,
    "999999999x9999",
    "1," + "9" * 400,
    ",".join(["0-99999"] * 900),
    ",".join(["7x9999"] * 900),
    "o" + "9" * 5000,
    "- o:" + "9" * 5000 + "/0-3 c:x j:/",
    "\ud800",
    "٣x٣",
    "[" * 5000,
    "a" * 9000,
    "9e300G",
    "nan",
    "1e999",
)
ODD = st.recursive(
    st.sampled_from((*TIMES, *NUMBERS, *FLOATS, *TEXTS, None, True, False))
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PAIRS = st.lists(st.lists(st.sampled_from(("n1", "n2")) | ODD, min_size=2, max_size=2))
"""For example the hosts of ``hostFaults`` and of ``inputErrors``."""


def odd_map(*keys: str, values: st.SearchStrategy[Any] = ODD) -> st.SearchStrategy[Any]:
    """Mappings of some of these keys, or another value."""
    return st.dictionaries(st.sampled_from(keys), values, max_size=len(keys)) | ODD


PACKED = odd_map(
    *("hosts", "seen", "said", "pending", "inARow", "at", "retryAt", "step"),
    *("shortLives", "attempt", "ended", "prepared", "failures", "faults", "failed"),
    *("pods", "gpus", "OutOfMemory", "failure"),
    values=ODD | PAIRS,
)
"""Contents of the texts of ``status.memory`` that are JSON."""
NOTES = odd_map(
    *("attempts", "ended", "faultyNodes", "givenBack", "gang", "usagePods", "formed"),
    *("settings", "finishingTime", "stopped", "coordinatorImage", "imageID"),
    values=ODD,
)
JSON_NOTES = ("budget", "hostFaults", "inputErrors", "usage", "preparation", "evaluation")
COUNTERS = ("coordinatorRestarts", "coordinatorLostSeconds")


def dump(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # an integer of more digits than Python writes
        return "9" * 5000


@st.composite
def memories(draw: st.DrawFn) -> Any:
    """The status field ``memory``."""
    notes = draw(NOTES)
    if not isinstance(notes, dict):
        return notes
    return {
        **notes,
        **draw(
            st.dictionaries(
                st.sampled_from((*JSON_NOTES, *COUNTERS)),
                PACKED.map(dump) | ODD,
                max_size=4,
            )
        ),
    }


CONDITION = odd_map("type", "status", "reason", "message", "lastTransitionTime") | (
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(("Complete", "Failed")),
            "status": st.just("True"),
            "lastTransitionTime": ODD,
        }
    )
)
SHOWN: Mapping[str, st.SearchStrategy[Any]] = {
    "memory": memories(),
    "conditions": st.lists(CONDITION, max_size=3) | ODD,
    "attempts": st.lists(odd_map("pod", "cause", "exitCode", "at"), max_size=2) | ODD,
    "coordinator": odd_map("attempt"),
    "lastFailure": odd_map("cause", "node", "rank", "step", "exitCode", "message", "at"),
    "failures": odd_map("withoutProgress", "checkpointStep"),
    "restarts": odd_map("total", "byCause", values=ODD | odd_map("a", "b")),
    "lostSeconds": odd_map("a", "b"),
    "nodes": odd_map("min", "max", "ready"),
    "checkpoint": odd_map("step", "savedAt"),
    "progress": odd_map(
        *("generation", "step", "totalSteps", "loss", "tokensPerSecond", "etaSeconds"),
        "updatedAt",
    ),
    "preparation": odd_map(
        "work", "source", "bytesDone", "bytesTotal", "documents", "tokens"
    ),
    "evaluation": odd_map(
        *("step", "evaluated", "results", "passedOver", "state", "message", "waiting"),
        values=ODD | st.lists(odd_map("name", "values"), max_size=2),
    ),
    **dict.fromkeys(
        ("phase", "reason", "message", "image", "attempt", "startTime", "completionTime"),
        ODD,
    ),
}
STATUSES = st.fixed_dictionaries({}, optional=SHOWN) | ODD
"""Statuses of any type below any key."""


def damaged(faults: str) -> dict[str, Any]:
    return {"memory": {"hostFaults": faults}}


HUGE = damaged(json.dumps({"hosts": [["h", 1]], "seen": [["h", int("9" * 400)]]}))
LISTED = damaged(json.dumps({"hosts": [["h", 1]], "seen": [[["x"], 1]]}))
COUNTED = {"memory": {"attempts": "9" * 5000}}
RANGED = {"memory": {"ended": "9" * 5000 + "-5"}}
GIVEN = {"memory": {"givenBack": "1," + "9" * 400}}
LATE = {"startTime": TIMES[0], "completionTime": TIMES[3]}
FIRST = {"startTime": "1969-12-31T23:59:59.999999Z"}
DAMAGED = (HUGE, LISTED, COUNTED, RANGED, GIVEN, LATE, FIRST)


def make_run(status: Any, **metadata: Any) -> dict[str, Any]:
    place = {"name": "odd", "namespace": "ns", "uid": "u", "resourceVersion": "1"}
    return {"metadata": {**place, **metadata}, "spec": {}, "status": status}


# ---- values ------------------------------------------------------------------------------------------------


@given(STATUSES)
@example(HUGE)
@example(LISTED)
@example(COUNTED)
@example(RANGED)
@example(GIVEN)
@example(LATE)
@example(FIRST)
def test_every_status_is_written_as_it_was_read(status: Any) -> None:
    memory = parse_memory(status if isinstance(status, dict) else {})
    built = build_memory(memory)
    json.dumps(built, allow_nan=False)
    # A status that differs at each write would be written forever.
    assert build_memory(parse_memory({**built, "conditions": memory.conditions})) == built


@given(memories())
@example(HUGE["memory"])
@example({"givenBack": "1," + "9" * 12})
@example({"ended": TEXTS[8], "attempts": TEXTS[9]})
@example({"coordinatorRestarts": dump({"a": 2**62}), "gang": "9" * 12})
@example({"evaluation": dump({"attempt": 1, "at": 1e300, "pending": [10**400]})})
def test_values_read_from_damaged_notes_can_be_written_again(notes: Any) -> None:
    built = build_memory(parse_memory({"memory": notes, "conditions": [{}]}))
    # Texts that no status can contain did not occur before and are left unchanged.
    assert all(
        len(value) <= 8192 or value == notes[key]
        for key, value in built.get("memory", {}).items()
    )
    kept = {key: value for key, value in built.items() if key != "memory"}
    assert problems_with(kept, status_schema()) == []


@given(ODD)
@example("9999-12-31T23:59:59-12:00")
@example("0001-01-01T00:00:00+12:00")
@example("0987-06-05T04:03:02Z")
def test_every_timestamp_that_can_be_read_can_be_written(value: Any) -> None:
    seconds = parse_time(value)
    if seconds is not None:
        assert parse_time(format_time(seconds)) == int(seconds)


@given(PACKED.map(dump) | ODD.map(str))
def test_hosts_can_be_parsed_from_any_text(text: str) -> None:
    hosts = parse_hosts(text)
    assert all(host.isascii() and at >= 0 for host, at in hosts.items())
    index = HostIndex()
    for number in range(2):
        index.update(("ns", f"run-{number}"), damaged_run(text))
    index.find_troubled(1e9)
    for number in range(2):
        index.update(("ns", f"run-{number}"), None)
    assert index.find_troubled(0.0) == ()


def damaged_run(text: str) -> dict[str, Any]:
    return make_run(damaged(text))


# ---- outside a pass
# -----------------------------------------------------------------------------------------


@given(STATUSES, STATUSES)
@example(HUGE, LISTED)
@example({"progress": {"step": 10**400, "totalSteps": 1}}, {})
@example({"restarts": {"byCause": {"a": 10**400}}}, {})
def test_damaged_status_does_not_break_the_cache_the_metrics_or_the_page(
    first: Any, second: Any
) -> None:
    cache = InformerCache()
    for version, status in enumerate((first, second), 1):
        cache.see(RUNS, make_run(status, resourceVersion=str(version)), is_watched=True)
        runs = cache.runs()
        count_phases(runs.values())
        facts = read_runs(runs, now=1e9)
        registry = CollectorRegistry()
        registry.register(FactsCollector(RunFactsSource(0, 0.0, 0, {}, {}, {}, facts)))
        generate_latest(registry)
        json.dumps(build_fleet(runs.values()), allow_nan=False)
    old, new = (one if isinstance(one, dict) else {} for one in (first, second))
    derive_events(old, new)


LABELS = st.dictionaries(
    st.sampled_from(
        [f"evergrad.dev/{name}" for name in ("run", "role", "index", "attempt")]
    ),
    st.sampled_from(("odd", "node", "coordinator", "1", "999999999", *TEXTS)) | ODD,
)


@given(LABELS | ODD, odd_map("evergrad.dev/restart", "run.evergrad.dev/odd"), ODD)
@example(
    {"evergrad.dev/role": "node", "evergrad.dev/index": "0", "evergrad.dev/attempt": "0"},
    {},
    {},
)
def test_damaged_metadata_do_not_break_the_cache(
    labels: Any, annotations: Any, storage: Any
) -> None:
    cache = InformerCache()
    metadata = {"labels": labels, "annotations": annotations}
    for resource in (RUNS, PODS, CLAIMS, CHILDREN):
        raw = {**make_run({}, **metadata), "kind": resource, "spec": {"storage": storage}}
        for is_deleted in (False, True):
            cache.see(resource, raw, is_deleted=is_deleted, is_watched=True)
        cache.replace(resource, [raw], version=2, covers=lambda _: True)
        pod = parse_pod(raw)
        assert pod is None or pod.index < 10_000


def test_a_pod_index_that_no_run_can_have_is_ignored() -> None:
    labels = {"evergrad.dev/role": "node", "evergrad.dev/attempt": "0"}
    raw = make_run({}, labels={**labels, "evergrad.dev/index": "999999999"})
    assert parse_pod(raw) is None


# ---- the operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", DAMAGED)
def test_a_damaged_status_does_not_stop_watches_startup_or_other_runs(
    status: dict[str, Any],
) -> None:
    simulation = Simulation()
    simulation.create_run("victim")
    simulation.create_run()
    simulation.settle()
    simulation.store.change("trainingruns", "ns", "victim", {"status": status})
    simulation.start_operator()
    simulation.resync()
    simulation.start_pods()
    simulation.settle()
    simulation.settle(("ns", "victim"))
    assert simulation.status["phase"] in ("Starting", "Running", "Waiting")
    assert simulation.pods()


def test_an_object_that_the_cache_cannot_store_is_logged_and_the_others_are_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = InformerCache()
    take = cache.host_index.update

    def fail_at_odd(key: Any, raw: Any) -> None:
        if key == ("ns", "odd"):
            raise ValueError("odd")
        take(key, raw)

    monkeypatch.setattr(cache.host_index, "update", fail_at_odd)
    counted: list[str] = []
    cache.on_defect = counted.append
    others = [make_run({}, name=name, uid=name) for name in ("first", "last")]
    with caplog.at_level(logging.ERROR):
        raws = [others[0], make_run({}), others[1]]
        found = cache.replace(RUNS, raws, version=1, covers=lambda _: True)
        assert cache.take(RUNS, make_run({}, resourceVersion="2")) == ()
    assert found == {("ns", "first"), ("ns", "last")} == set(cache.runs())
    assert counted == [RUNS, RUNS]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "trainingruns ns/odd"
    ] * 2


# ---- the next pods -----------------------------------------------------------------------------------------

LARGE = (500_001, 10**8 + 1, 999_999_999, 10**9, 2**31 - 1, -7)
"""Attempts whose successors a coordinator would refuse, or a pod's label could not name."""


def lose_coordinator(simulation: Simulation) -> None:
    with simulation.by_others():
        for name in simulation.pods("coordinator"):
            simulation.store.remove("pods", "ns", name)
    simulation.coordinators.answers.clear()


CLAIM = ("persistentvolumeclaims", "ns", "run")
RECORD = "run.evergrad.dev/run"


def read_record(simulation: Simulation) -> dict[str, Any]:
    raw = simulation.store.get(*CLAIM)["metadata"]["annotations"][RECORD]
    return dict(json.loads(raw))


def edit_record(simulation: Simulation, **fields: Any) -> None:
    text = json.dumps({**read_record(simulation), **fields})
    with simulation.by_others():
        simulation.store.change(*CLAIM, {"metadata": {"annotations": {RECORD: text}}})


@pytest.mark.parametrize("epoch", LARGE)
def test_an_edited_epoch_in_a_record_leads_to_one_coordinator(epoch: int) -> None:
    simulation = make_trained()
    edit_record(simulation, epoch=epoch)
    lose_coordinator(simulation)
    for _ in range(5):
        simulation.reconcile()
        simulation.now += 5
    assert simulation.pods("coordinator") == ["run-coordinator-1"]
    assert read_record(simulation)["epoch"] == 1


@pytest.mark.parametrize("attempt", LARGE)
@pytest.mark.parametrize(
    "status",
    [
        lambda attempt: {"coordinator": {"attempt": attempt}},
        lambda attempt: {"memory": {"attempts": f"{attempt}x2"}},
        lambda attempt: {"attempt": attempt},
    ],
)
def test_an_edited_attempt_in_a_status_does_not_change_the_number_of_pods(
    status: Any, attempt: int
) -> None:
    simulation = make_trained()
    simulation.store.change("trainingruns", *KEY, {"status": status(attempt)})
    lose_coordinator(simulation)
    with simulation.by_others():
        simulation.store.remove("pods", "ns", simulation.pods()[0])
    for _ in range(8):
        simulation.reconcile()
        simulation.reap()
        simulation.start_pods()
        simulation.now += 5
    assert (len(simulation.pods("coordinator")), len(simulation.pods())) == (1, 2)
    assert all(int(name.rpartition("-")[2]) <= 10**8 + 9 for name in simulation.pods())


def test_an_attempt_within_the_bound_is_accepted_and_its_successors_are_read() -> None:
    for role, most in (("node", 10**8), ("coordinator", 500_000)):
        labels = {"role": role, "index": "0", "attempt": str(most + 1000)}
        prefixed = {f"evergrad.dev/{key}": value for key, value in labels.items()}
        assert parse_pod(make_run({}, labels=prefixed)) is not None
    notes = {"attempts": str(10**8), "preparation": dump({"attempt": 10**8})}
    memory = parse_memory({"memory": notes, "coordinator": {"attempt": 500_000}})
    assert memory.attempts == (10**8,)
    assert (memory.coordinator.attempt, memory.preparation.attempt) == (500_000, 10**8)
    for name in ("preparation", "evaluation"):
        damaged_notes = {name: dump({"attempt": 10**8 + 1})}
        found = parse_memory({"memory": damaged_notes})
        assert getattr(found, name).attempt == -1


# ---- records on a volume -----------------------------------------------------------------------------------


def share_claim(simulation: Simulation, text: str) -> None:
    claim = {
        "metadata": {
            "name": "shared",
            "namespace": "ns",
            "annotations": {"run.evergrad.dev/other": text},
        },
        "spec": {"accessModes": ["ReadWriteMany"]},
        "status": {"phase": "Bound"},
    }
    with simulation.by_others():
        simulation.store.create("persistentvolumeclaims", claim)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        '{"path":"other","complete":{"at":' + "[" * 900 + "]" * 900 + "}}",
        '{"path":"other","epoch":' + "9" * 4000 + "}",
        '{"path":"other","created":1e999,"complete":{"step":true}}',
        '{"path":"\\ud800","recipe":3}',
    ],
)
def test_a_damaged_record_of_another_run_does_not_end_a_pass_on_a_shared_volume(
    text: str,
) -> None:
    simulation = Simulation()
    share_claim(simulation, text)
    simulation.create_run(storage={"claimName": "shared"})
    simulation.settle()
    assert simulation.pods("coordinator")


@pytest.mark.parametrize("at", [*TIMES, "x", 3, None, [[]]])
@pytest.mark.parametrize("step", [7, True, -1, 10**30, None])
def test_a_damaged_end_in_a_record_still_counts_as_an_end(at: Any, step: Any) -> None:
    simulation = make_trained()
    edit_record(simulation, complete={"at": at, "step": step})
    simulation.settle()
    status = simulation.status
    assert (status["phase"], status["reason"]) == ("Complete", "Complete")
    assert problems_with(status, status_schema()) == []


@given(
    st.dictionaries(st.sampled_from(("path", "recipe", "epoch", "uid", "created")), ODD),
    ODD,
)
def test_every_record_can_be_read_and_written(
    record: dict[str, Any], complete: Any
) -> None:
    content = {"path": "p", **record, "complete": complete}
    claim = {
        "metadata": {
            "name": "docs-lm",
            "annotations": {"run.evergrad.dev/docs-lm": dump(content)},
        }
    }
    children = {("PersistentVolumeClaim", "docs-lm"): claim}
    seen = observe(parse_run(make_docs_run()), children=children).claim
    assert seen is not None
    for one in seen.records.values():
        json.loads(build_record(one))
        assert -1 <= one.epoch <= 500_000

"""Raw pods, claims, other runs and coordinators' responses → values; invalid parts have no effect."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_run import START, Simulation, make_run

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.errors import OperatorError, ProgressError
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.coordinator_status import parse_progress
from evergrad_operator.core.observe.observe import build_record, observe
from evergrad_operator.core.observe.pods import MAX_MESSAGE, describe_cause, parse_pod
from evergrad_operator.core.observe.spec import parse_run

LABELS = {
    "evergrad.dev/run": "docs-lm",
    "evergrad.dev/role": "node",
    "evergrad.dev/index": "2",
    "evergrad.dev/attempt": "1",
}


def make_pod(
    status: dict[str, Any], *, labels: dict[str, str] | None = None, **metadata: Any
) -> dict[str, Any]:
    owner = {"uid": "uid-docs-lm"}
    content = {
        "name": "docs-lm-2-1",
        "uid": "u",
        "labels": labels or LABELS,
        "ownerReferences": [owner],
        **metadata,
    }
    return {
        "metadata": {**content, "creationTimestamp": format_time(START)},
        "spec": {"nodeName": "a"},
        "status": status,
    }


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    state = {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "finishedAt": format_time(START + 9),
        }
    }
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": state}],
    }


def test_a_pod_is_parsed_into_values() -> None:
    status = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {"name": "trainer", "state": {"running": {"startedAt": "x"}}}
        ],
    }
    pod = parse_pod(make_pod(status, annotations={"evergrad.dev/restart": "3"}))
    assert pod is not None
    assert (pod.name, pod.uid, pod.role, pod.index, pod.attempt, pod.restart) == (
        "docs-lm-2-1",
        "u",
        "node",
        2,
        1,
        3,
    )
    assert (pod.is_live, pod.is_running, pod.is_ready, pod.is_leaving) == (
        True,
        True,
        True,
        False,
    )
    assert (pod.created_at, pod.node_name, pod.ip) == (START, "a", "10.0.0.1")


def test_an_ended_pod_is_parsed_with_its_message_and_time() -> None:
    pod = parse_pod(make_pod(terminated(70, message="x" * 3000 + "the cause")))
    assert pod is not None and pod.end is not None
    assert (pod.end.cause, pod.end.exit_code, pod.end.at) == (
        PodCause.WORKER_CRASH,
        70,
        START + 9,
    )
    assert pod.end.message.endswith("the cause")
    assert len(pod.end.message) == MAX_MESSAGE


@pytest.mark.parametrize(
    ("status", "deleting", "cause"),
    [
        (terminated(0, "Completed"), False, PodCause.DONE),
        (terminated(0, "Completed"), True, PodCause.DONE),
        (terminated(64), True, PodCause.USER_ERROR),
        (terminated(137, "OOMKilled"), True, PodCause.OUT_OF_MEMORY),
        (terminated(75), True, PodCause.DELETED),
        (terminated(143), True, PodCause.DELETED),
        (terminated(75), False, PodCause.STOPPED),
        ({"phase": "Failed"}, False, PodCause.NODE_LOST),
        ({"phase": "Failed", "reason": "Evicted"}, False, PodCause.EVICTED),
        ({"phase": "Failed", "reason": "Preempting"}, False, PodCause.PREEMPTED),
        ({"phase": "Failed", "reason": "OutOfmemory"}, False, PodCause.REFUSED_BY_NODE),
        ({"phase": "Failed", "reason": "SomethingNew"}, False, PodCause.EVICTED),
        ({"phase": "Succeeded"}, False, PodCause.DONE),
        ({**terminated(70), "reason": "Evicted"}, False, PodCause.EVICTED),
    ],
)
def test_the_component_that_ended_a_pod_outweighs_all_but_definite_exit_codes(
    status: dict[str, Any], deleting: bool, cause: PodCause
) -> None:
    times = {"deletionTimestamp": format_time(START + 30)} if deleting else {}
    pod = parse_pod(make_pod(status, **times))
    assert pod is not None
    assert describe_cause(pod) == cause


def test_an_ended_coordinator_container_that_restarts_does_not_end_its_pod() -> None:
    labels = {**LABELS, "evergrad.dev/role": "coordinator"}
    state = {"terminated": {"exitCode": 1, "reason": "Error"}}
    status = {
        "phase": "Running",
        "containerStatuses": [{"name": "coordinator", "state": state, "restartCount": 1}],
    }
    pod = parse_pod(make_pod(status, labels=labels))
    assert pod is not None
    assert (pod.is_live, pod.is_running) == (True, False)


def test_a_node_whose_container_has_ended_has_ended_before_the_pod_phase_changes() -> None:
    pod = parse_pod(make_pod({**terminated(70), "phase": "Running"}))
    assert pod is not None
    assert pod.end is not None


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {**LABELS, "evergrad.dev/role": "other"},
        {**LABELS, "evergrad.dev/index": "x"},
        {**LABELS, "evergrad.dev/attempt": "-1"},
        {**LABELS, "evergrad.dev/attempt": "9" * 30},
    ],
)
def test_a_pod_without_evergrad_labels_is_ignored(labels: dict[str, str]) -> None:
    assert parse_pod(make_pod({"phase": "Running"}, labels=labels or {"a": "b"})) is None


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = ("phase", "conditions", "containerStatuses", "reason", "message", "podIP")


@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING))
def test_no_status_of_a_pod_breaks_the_operator(status: dict[str, Any]) -> None:
    pod = parse_pod(make_pod(status))
    assert pod is not None
    describe_cause(pod)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "memory",
                "conditions",
                "nodes",
                "coordinator",
                "progress",
                "attempts",
                "failures",
            ]
        ),
        ANYTHING,
    )
)
def test_no_status_of_a_run_breaks_the_operator(status: dict[str, Any]) -> None:
    world = Simulation()
    world.raw["status"] = status
    world.reconcile()


def test_foreign_annotations_and_broken_records_are_ignored() -> None:
    annotations = {
        "note": "x",
        "run.evergrad.dev/a": "not JSON",
        "run.evergrad.dev/b": "[]",
        "run.evergrad.dev/c": '{"path": 3}',
        "run.evergrad.dev/d": '{"path": "d", "epoch": "x", "complete": 3, "created": null}',
        "run.evergrad.dev/e": "[" * 5000,
        "run.evergrad.dev/f": 3,
    }
    claim = {
        "metadata": {"name": "docs-lm", "annotations": annotations},
        "status": {"phase": "Bound"},
    }
    seen = observe(
        parse_run(make_run()), children={("PersistentVolumeClaim", "docs-lm"): claim}
    )
    assert seen.claim is not None
    assert list(seen.claim.records) == ["d"]
    assert (seen.claim.records["d"].epoch, seen.claim.records["d"].complete) == (-1, None)


def test_a_record_is_read_as_it_was_written() -> None:
    world = Simulation()
    world.reconcile()
    written = world.decision.record
    assert written is not None
    claim = world.look().claim
    assert claim is not None
    assert claim.records["docs-lm"] == written
    assert len(build_record(written)) < 300


def test_only_other_runs_in_the_same_folder_of_the_same_claim_are_observed() -> None:
    run = make_run("mine", storage={"claimName": "shared", "path": "x"})
    others = [
        make_run("mine", storage={"claimName": "shared"}),
        make_run("there", storage={"claimName": "shared", "path": "x//z/."}),
        make_run("beside", storage={"claimName": "shared", "path": "xy"}),
        make_run("elsewhere"),
        make_run("shared", storage={"path": "x"}),
        {"metadata": {}, "spec": "broken"},
        {"metadata": {"name": "broken"}, "spec": {"storage": {"claimName": 3}}},
    ]
    seen = observe(parse_run(run), others=others)
    assert [(other.name, other.path) for other in seen.others] == [
        ("there", "x/z"),
        ("shared", "x"),
    ]


def test_a_recipe_is_equal_in_any_key_order_and_with_null_values() -> None:
    run = make_run()
    training = run["spec"]["training"]
    turned = dict(reversed(training.items())) | {
        "schedule": None,
        "logging": {"every": {"steps": 5}},
    }
    run["spec"]["training"] = {
        key: value for key, value in training.items() if key != "schedule"
    }
    assert recipe_of(run) == recipe_of(make_run(training=turned))
    assert recipe_of(run) != recipe_of(
        make_run(training={**training, "horizon": {"steps": 3}})
    )
    one, other = ({"training": None, "script": {"command": [name]}} for name in "ab")
    assert recipe_of(make_run(**one)) != recipe_of(make_run(**other))


def recipe_of(raw: dict[str, Any]) -> str:
    return parse_run(raw).parsed.recipe_hash


def test_a_coordinator_status_is_parsed_into_values() -> None:
    from evergrad_coordinator.rules.group import new_group
    from evergrad_coordinator.rules.state import GroupSettings
    from evergrad_coordinator.rules.status import build_status

    raw = build_status(
        new_group(
            GroupSettings(
                run="docs-lm", min_nodes=2, max_nodes=3, expect=3, token="secret"
            ),
            generation=0,
            now=0.0,
        ),
        now=1.0,
    )
    progress = parse_progress(raw, attempt=4)
    assert (progress.attempt, progress.phase, progress.min_nodes, progress.max_nodes) == (
        4,
        "Waiting",
        2,
        3,
    )
    assert (progress.step, progress.loss, progress.last_failure) == (None, None, None)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"phase": 3, "nodes": {}},
        {"phase": "Running"},
        {"phase": "Running", "nodes": []},
    ],
)
def test_a_status_that_no_coordinator_sends_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ProgressError, match="another program") as refused:
        parse_progress(raw, attempt=1)
    assert isinstance(refused.value, OperatorError)


FIELDS = (
    "step",
    "loss",
    "lastFailure",
    "restarts",
    "lostSeconds",
    "usage",
    "generation",
    "etaSeconds",
    "reason",
    "message",
    "totalSteps",
)


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING))
def test_no_response_on_the_port_of_a_coordinator_breaks_the_operator(
    fields: dict[str, Any],
) -> None:
    world = Simulation()
    world.reconcile()
    world.start()
    world.progress = parse_progress(
        {"phase": "Running", "nodes": {"min": 2, "max": 3}, **fields}, attempt=0
    )
    world.reconcile()

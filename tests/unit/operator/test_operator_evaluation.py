"""Each published checkpoint of a run with ``spec.evaluation`` is evaluated in a separate pod."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from fake_kubernetes.recipe import TRAINING
from fake_kubernetes.simulation import CONFIG, KEY, Crash, Simulation, crash_at
from fake_kubernetes.store import RefusedError, Write
from pod_security import violations
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from evergrad_common.contract import ErrorKind, encode_termination
from evergrad_common.evaluation_report import decode_evaluated, encode_evaluated
from evergrad_operator.core.objects.status_codec import decode, encode
from evergrad_operator.core.observe.evaluation import EvaluationProgress, Tries
from evergrad_operator.core.observe.facts import read_runs
from evergrad_operator.core.status.events import derive_events
from evergrad_operator.edge.metrics.operator_metrics import FactsCollector, RunFactsSource

SECTION = {"resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}}}
ROW = {"name": "heldOut", "loss": 2.123456789012345, "perplexity": 8.359, "step": 2}
RECIPE = {
    **TRAINING,
    "evaluation": {
        key: value for key, value in TRAINING["evaluation"].items() if key != "every"
    },
}


def make(section: Mapping[str, Any] = SECTION, **spec: Any) -> Simulation:
    """A run that trains and has published no checkpoint so far."""
    simulation = Simulation()
    simulation.create_run(training=copy.deepcopy(RECIPE), evaluation=section, **spec)
    simulation.settle()
    start(simulation)
    simulation.train()
    simulation.settle()
    return simulation


@pytest.fixture
def simulation() -> Simulation:
    return make()


def start(simulation: Simulation) -> None:
    simulation.start_pods()
    simulation.settle()


def publish(simulation: Simulation, step: int) -> None:
    simulation.train(step=step, checkpointStep=step)
    simulation.settle()


def end(simulation: Simulation, name: str, step: int, **more: Any) -> None:
    """The pod writes its report, and exits with 0."""
    report = encode_evaluated(step, [{**ROW, "step": step}], **more)
    simulation.end_pod(name, message=report.decode())
    simulation.settle()


def complete(simulation: Simulation) -> None:
    simulation.train(step=10, checkpointStep=10, phase="Complete")
    simulation.settle()
    for name in simulation.pods():
        simulation.end_pod(name)
    for _ in range(3):
        simulation.settle()
        simulation.reap()


def edit(simulation: Simulation, **spec: Any) -> None:
    simulation.store.change("trainingruns", *KEY, {"spec": spec})


def pod(simulation: Simulation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = simulation.store.get("pods", "ns", name)
    return found


def shown(simulation: Simulation) -> dict[str, Any]:
    found: dict[str, Any] = simulation.status["evaluation"]
    return found


@pytest.mark.capability("C-2")
def test_each_checkpoint_gets_one_pod_and_its_exact_results_are_in_the_status(
    simulation: Simulation,
) -> None:
    assert simulation.pods("evaluation") == []
    assert shown(simulation)["state"] == "UpToDate"
    publish(simulation, 2)
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"]
    start(simulation)
    assert (shown(simulation)["state"], shown(simulation)["waiting"]) == ("Evaluating", 1)
    assert simulation.status["phase"] == "Running"

    end(simulation, "run-evaluate-2-0", 2)
    (result,) = shown(simulation)["results"]
    assert result["name"] == "heldOut"
    assert float(result["values"]["loss"]) == ROW["loss"]
    assert (shown(simulation)["state"], shown(simulation)["step"]) == ("UpToDate", 2)
    assert (shown(simulation)["evaluated"], shown(simulation)["waiting"]) == (1, 0)
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"], "it is made once"
    assert simulation.status["restarts"]["total"] == 0


def test_evaluation_takes_the_oldest_checkpoint_first_and_finds_unreported_checkpoints(
    simulation: Simulation,
) -> None:
    publish(simulation, 4)
    start(simulation)
    publish(simulation, 6)
    publish(simulation, 8)
    assert simulation.pods("evaluation") == ["run-evaluate-4-0"]
    assert shown(simulation)["waiting"] == 3
    # Step 5 was published between two responses of the coordinator, so only the volume shows it.
    end(simulation, "run-evaluate-4-0", 4, waiting=[5, 6, 8])
    assert "run-evaluate-5-1" in simulation.pods("evaluation")
    for serial, step in enumerate((5, 6, 8), start=1):
        start(simulation)
        end(simulation, f"run-evaluate-{step}-{serial}", step)
    assert (shown(simulation)["evaluated"], shown(simulation)["step"]) == (4, 8)
    assert simulation.pods("evaluation") == ["run-evaluate-8-3"], (
        "of those that ended one stays"
    )


def test_a_late_result_of_an_older_checkpoint_does_not_hide_the_newest(
    simulation: Simulation,
) -> None:
    publish(simulation, 4)
    start(simulation)
    end(simulation, "run-evaluate-4-0", 4, waiting=[2])
    start(simulation)
    report = encode_evaluated(2, [{**ROW, "loss": 9.5}])
    simulation.end_pod("run-evaluate-2-1", message=report.decode())
    simulation.settle()
    (result,) = shown(simulation)["results"]
    assert (shown(simulation)["step"], shown(simulation)["evaluated"]) == (4, 2)
    assert float(result["values"]["loss"]) == ROW["loss"]


def test_the_evaluation_pod_has_its_own_resources_and_no_token_or_manifest(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    raw = pod(simulation, "run-evaluate-2-0")
    (container,) = raw["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "500m"},
        "limits": {"memory": "2Gi"},
    }
    text = " ".join(container["args"])
    assert text == (
        "evaluate /volume/run --checkpoint 2 --termination-log /dev/termination-log"
    )
    assert container["image"] == CONFIG.trainer_image
    volumes = {one["name"] for one in raw["spec"]["volumes"]}
    assert volumes == {"evergrad-volume", "evergrad-tmp", "evergrad-shm"}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert raw["metadata"]["labels"]["evergrad.dev/role"] == "evaluation"
    assert violations(raw) == []
    assert raw["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("code", [75, 137, 143])
def test_a_lost_evaluation_pod_is_replaced_for_the_same_checkpoint(
    simulation: Simulation, code: int
) -> None:
    publish(simulation, 2)
    start(simulation)
    simulation.end_pod("run-evaluate-2-0", code)
    simulation.settle()
    assert "run-evaluate-2-1" in simulation.pods("evaluation")
    start(simulation)
    end(simulation, "run-evaluate-2-1", 2)
    assert (shown(simulation)["evaluated"], shown(simulation)["state"]) == (1, "UpToDate")


def refuse_pods(simulation: Simulation, part: str) -> None:
    """Exhaust the quota for pods whose name contains this part."""

    def before(write: Write) -> None:
        if (write.verb, write.plural) == ("create", "pods") and part in write.name:
            raise RefusedError(403, "Forbidden", f"{write.name}: exceeded quota: gpus")

    simulation.store.before = before


def test_a_refused_evaluation_pod_does_not_block_replacement_of_nodes_or_coordinator(
    simulation: Simulation,
) -> None:
    refuse_pods(simulation, "evaluate")
    publish(simulation, 2)
    assert simulation.pods("evaluation") == []
    simulation.now += 100
    simulation.end_pod("run-1-0", 1)
    simulation.store.remove("pods", "ns", "run-coordinator-0")
    simulation.coordinators.answers.clear()
    simulation.settle()
    simulation.now += 10
    simulation.settle()
    assert simulation.pods("coordinator") == ["run-coordinator-1"]
    assert simulation.pods() == ["run-0-0", "run-1-0", "run-1-1"]
    # Its step waits, and the others are still evaluated.
    assert simulation.refused() == [("create", "run-evaluate-2-0", "Forbidden")]


def test_a_refused_node_pod_does_not_block_the_evaluation_of_a_checkpoint(
    simulation: Simulation,
) -> None:
    refuse_pods(simulation, "run-1-")
    simulation.now += 100
    simulation.end_pod("run-1-0", 75)
    simulation.settle()
    assert simulation.refused() == [("create", "run-1-1", "Forbidden")]
    publish(simulation, 2)
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"]


def test_a_user_error_ends_only_the_evaluation_until_the_run_is_edited(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    said = encode_termination(
        ErrorKind.INPUT, "/documents/held.jsonl: does not exist"
    ).decode()
    simulation.end_pod("run-evaluate-2-0", 64, message=said)
    simulation.settle()
    assert shown(simulation)["state"] == "Failed"
    assert "/documents/held.jsonl: does not exist" in shown(simulation)["message"]
    publish(simulation, 4)
    simulation.now += 3600
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"]
    assert simulation.status["phase"] == "Running" and len(simulation.pods()) == 2

    edit(simulation, evaluation={"resources": {"requests": {"cpu": "1"}}})
    simulation.settle()
    assert "run-evaluate-2-1" in simulation.pods("evaluation")
    assert simulation.pods() == ["run-0-0", "run-1-0"], (
        "its resources are no nodes' concern"
    )


def test_repeated_evaluation_failures_stop_at_the_limit_of_the_evaluation_and_name_it(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    for attempt in range(4):
        assert f"run-evaluate-2-{attempt}" in simulation.pods("evaluation")
        start(simulation)
        simulation.now += 60
        simulation.end_pod(f"run-evaluate-2-{attempt}", 137, reason="OOMKilled")
        simulation.settle()
        simulation.now += 600
        simulation.settle()
    assert shown(simulation)["state"] == "Failed"
    assert "spec.evaluation.resources.limits.memory" in shown(simulation)["message"]
    assert simulation.status["phase"] == "Running"
    assert simulation.status["failures"]["withoutProgress"] == 0
    assert simulation.pods("evaluation") == ["run-evaluate-2-3"]


def test_a_failed_evaluation_waits_before_its_next_pod(simulation: Simulation) -> None:
    publish(simulation, 2)
    for attempt in range(2):
        start(simulation)
        simulation.now += 5
        simulation.end_pod(f"run-evaluate-2-{attempt}", 1, message="Traceback")
        simulation.settle()
    assert "run-evaluate-2-2" not in simulation.pods("evaluation")
    assert shown(simulation)["state"] == "Waiting"
    assert "the next pod is created at" in shown(simulation)["message"]
    assert "Traceback" in shown(simulation)["message"]
    simulation.now += 60
    simulation.settle()
    assert "run-evaluate-2-2" in simulation.pods("evaluation")


def test_a_host_fault_counts_no_evaluation_failure_and_the_next_pod_avoids_the_host(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    said = encode_termination(ErrorKind.ENVIRONMENT, "the mount is gone").decode()
    simulation.end_pod("run-evaluate-2-0", 70, message=said)
    simulation.settle()
    raw = pod(simulation, "run-evaluate-2-1")
    wishes = raw["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert '"n1"' in json.dumps(wishes)


def test_an_unreadable_checkpoint_is_skipped_with_an_event(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    before = simulation.status
    report = encode_evaluated(2, [], passed_over="contains no checkpoint of step 2")
    simulation.end_pod("run-evaluate-2-0", message=report.decode())
    simulation.settle()
    assert shown(simulation)["passedOver"] == "step 2: contains no checkpoint of step 2"
    assert (shown(simulation)["state"], shown(simulation)["evaluated"]) == ("UpToDate", 0)
    reasons = [event.reason for event in derive_events(before, simulation.status)]
    assert reasons == ["CheckpointPassedOver"]


def test_an_image_that_writes_no_report_is_not_retried_without_limit(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    simulation.end_pod("run-evaluate-2-0", message="done")
    simulation.settle()
    assert shown(simulation)["state"] == "Failed"
    assert "left no results" in shown(simulation)["message"]


def test_the_last_checkpoint_is_evaluated_after_completion_and_before_cleanup() -> None:
    simulation = make(ttlSecondsAfterFinished=0)
    complete(simulation)
    assert simulation.status["phase"] == "Complete"
    assert simulation.pods("evaluation") == ["run-evaluate-10-0"]
    assert ("configmaps", "run-config") in [one[:2] for one in simulation.children()]
    start(simulation)
    assert (simulation.status["phase"], shown(simulation)["state"]) == (
        "Complete",
        "Evaluating",
    )
    end(simulation, "run-evaluate-10-0", 10)
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert shown(simulation)["step"] == 10
    assert simulation.pods("evaluation") == []
    assert ("configmaps", "run-config") not in [one[:2] for one in simulation.children()]


def test_suspension_deletes_the_pod_and_a_resumed_run_evaluates_the_same_checkpoint(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    edit(simulation, suspend=True)
    simulation.settle()
    assert simulation.status["phase"] == "Suspending"
    simulation.reap()
    nodes = {"min": 1, "max": 2, "ready": 0, "connected": 0, "members": []}
    simulation.train(step=2, checkpointStep=2, nodes=nodes)
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.status["phase"] == "Suspended"
    assert simulation.pods("evaluation") == []
    edit(simulation, suspend=False)
    simulation.settle()
    assert simulation.pods("evaluation") == [], "nodes come first"
    start(simulation)
    simulation.train(step=2, checkpointStep=2)
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-1"]


def test_removing_the_section_deletes_the_pod_and_training_continues_after_a_restart(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    edit(simulation, evaluation=None)
    for _ in range(4):
        simulation.settle()
        simulation.reap()
    assert simulation.pods("evaluation") == []
    # The nodes evaluate between steps again, so all nodes must agree on that.
    assert simulation.pods() == ["run-0-1", "run-1-1"]


def test_a_deleted_run_gets_no_further_evaluation_pod(simulation: Simulation) -> None:
    publish(simulation, 2)
    start(simulation)
    deleted = {"deletionTimestamp": "2027-01-15T08:00:00Z"}
    simulation.store.change("trainingruns", *KEY, {"metadata": deleted})
    simulation.end_pod("run-evaluate-2-0", 137)
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"]


def test_a_deadline_ends_the_evaluation_too() -> None:
    simulation = make(activeDeadlineSeconds=100)
    publish(simulation, 2)
    start(simulation)
    simulation.now += 101
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.status["reason"] == "DeadlineExceeded"
    assert simulation.pods("evaluation") == []


def test_a_single_host_volume_places_the_pod_with_the_nodes_and_off_a_host_they_left() -> (
    None
):
    simulation = make()
    with simulation.by_others():
        modes = {"spec": {"accessModes": ["ReadWriteOnce"]}}
        simulation.store.change("persistentvolumeclaims", "ns", "run", modes)
    publish(simulation, 2)
    terms = pod(simulation, "run-evaluate-2-0")["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    this = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    assert terms == [{"matchFields": [this]}]
    start(simulation)
    for name in simulation.pods():
        simulation.store.change("pods", "ns", name, {"spec": {"nodeName": "n2"}})
    simulation.settle()
    assert pod(simulation, "run-evaluate-2-0")["metadata"].get("deletionTimestamp")


def test_the_manifest_of_the_nodes_contains_only_keep_waiting_of_the_evaluation(
    simulation: Simulation,
) -> None:
    text = simulation.store.get("configmaps", "ns", "run-config")["data"][
        "trainingrun.json"
    ]
    assert json.loads(text)["spec"]["evaluation"] == {"keepWaiting": 4}


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_an_operator_killed_at_any_write_evaluates_each_checkpoint_once(
    number: int, is_before: bool
) -> None:
    simulation = make()
    simulation.store.before, simulation.store.after = crash_at(number, is_before=is_before)

    def settle() -> None:
        try:
            simulation.settle()
        except Crash:
            simulation.store.before = simulation.store.after = lambda write: None
            simulation.start_operator()
            # The first pass starts to poll the coordinator, the second has its response.
            simulation.settle()
            simulation.settle()

    made = set()
    for step in (2, 4):
        simulation.train(step=step, checkpointStep=step)
        settle()
        made.update(simulation.pods("evaluation"))
        with simulation.by_others():
            simulation.start_pods()
        settle()
        report = encode_evaluated(step, [ROW]).decode()
        with simulation.by_others():
            simulation.end_pod(f"run-evaluate-{step}-{step // 2 - 1}", message=report)
        settle()
    assert made == {"run-evaluate-2-0", "run-evaluate-4-1"}
    assert (shown(simulation)["step"], shown(simulation)["waiting"]) == (4, 0)
    assert shown(simulation)["evaluated"] == 2


def test_results_are_gauges_of_the_run_and_are_removed_with_it(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    end(simulation, "run-evaluate-2-0", 2)
    raw = simulation.store.get("trainingruns", *KEY)
    facts = RunFactsSource(0, 0.0, 0, {}, {}, {}, read_runs({KEY: raw}, now=simulation.now))
    registry = CollectorRegistry()
    collector = FactsCollector(facts)
    registry.register(collector)
    text = generate_latest(registry).decode()
    one = 'evergrad_operator_run_evaluation_value{metric="loss",run="run",run_namespace="ns",set="heldOut"}'
    assert f"{one} {ROW['loss']}" in text
    assert 'evergrad_operator_run_evaluation_step{run="run",run_namespace="ns"} 2.0' in text
    assert "evergrad_operator_run_evaluations_waiting" in text
    collector.facts = RunFactsSource(0, 0.0, 0, {}, {}, {}, ())
    assert 'set="heldOut"' not in generate_latest(registry).decode()


def test_a_host_that_failed_an_evaluation_is_avoided_for_a_day(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    broken = {"spec": {"nodeName": "broken"}}
    simulation.store.change("pods", "ns", "run-evaluate-2-0", broken)
    message = encode_termination(ErrorKind.ENVIRONMENT, "the mount is not writable")
    simulation.end_pod("run-evaluate-2-0", 70, message=message.decode())
    simulation.settle()
    simulation.now += 60
    simulation.settle()
    for step in (2, 3, 4):
        if step > 2:
            publish(simulation, step)
        name = f"run-evaluate-{step}-{step - 1}"
        is_avoided = "broken" in json.dumps(pod(simulation, name)["spec"])
        assert is_avoided == (step < 4), step
        start(simulation)
        end(simulation, name, step)
        for _ in range(3):
            simulation.reap()
            simulation.settle()
        simulation.now += 12 * 3600
        simulation.settle()
    assert "broken" not in json.dumps(simulation.status["memory"])


def test_a_host_without_a_noted_time_in_an_older_status_is_avoided_for_a_day(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    end(simulation, "run-evaluate-2-0", 2)
    note = json.loads(simulation.status["memory"]["evaluation"])
    old = {"evaluation": json.dumps({**note, "hosts": [["broken", 1]]})}
    simulation.store.change("trainingruns", *KEY, {"status": {"memory": old}})
    simulation.start_operator()
    publish(simulation, 3)
    assert "broken" in json.dumps(pod(simulation, "run-evaluate-3-1")["spec"])
    simulation.now += 24 * 3600 + 1
    simulation.settle()
    assert "broken" not in simulation.status["memory"]["evaluation"]


def test_the_evaluation_notes_are_read_back_and_bounded() -> None:
    known = EvaluationProgress(
        attempt=3,
        is_recorded=True,
        seen=8,
        pending=(6, 8),
        tries=Tries(2, 1, 1, (("n1", 1), ("n2", 1)), 5.0, 9.0, (("n2", 4.0),)),
        failed=4,
        failure="why",
        step=4,
        evaluated=2,
        results={"heldOut": {"loss": "2.5"}},
        passed_over="step 1: gone",
        state="Failed",
        message="why",
    )
    assert decode(EvaluationProgress, encode(known)) == known
    damaged = {"memory": {"evaluation": "["}}
    assert decode(EvaluationProgress, damaged) == EvaluationProgress()
    assert encode(EvaluationProgress()) == {}
    many = {"results": [{"name": f"s{n}", "values": {"loss": "1" * 99}} for n in range(99)]}
    note = json.dumps({"pending": [*range(999), "x", True]})
    found = decode(EvaluationProgress, {"evaluation": many, "memory": {"evaluation": note}})
    assert len(found.results) == 16 and len(found.pending) == 64
    assert {len(one["loss"]) for one in found.results.values()} == {32}


def test_a_report_fits_a_termination_message_for_any_measured_values() -> None:
    rows = [
        {
            **ROW,
            "name": f"set {n}" + "é" * 40,
            "metrics": {f"m{k}" * 30: k / 7 for k in range(9)},
        }
        for n in range(40)
    ]
    data = encode_evaluated(7, rows, waiting=range(100, 400), passed_over="")
    assert len(data) <= 4096
    report = decode_evaluated(data.decode())
    assert report is not None
    assert (report.step, report.left_out) == (7, 40 - len(report.results))
    assert report.results and report.left_out > 0
    first = next(iter(report.results.values()))
    assert float(first["loss"]) == ROW["loss"]
    for odd in ("", "[]", "{}", "null", '{"step": -1}', '{"step": true}', "[" * 5000):
        assert decode_evaluated(odd) is None


@pytest.mark.parametrize("letter", ["a", "é", "\U0001f600"])
def test_a_report_without_results_fits_for_any_characters_in_its_reason(
    letter: str,
) -> None:
    waiting = range(10**6, 10**6 + 64)
    data = encode_evaluated(100, [], waiting=waiting, passed_over=letter * 600)
    assert len(data) <= 4096
    report = decode_evaluated(data.decode())
    assert report is not None and report.waiting == tuple(waiting)
    assert 250 < len(report.passed_over) <= 512
    assert set(report.passed_over) == {letter}


# ---- states that would wait forever
# -------------------------------------------------------------------------


def make_on_one_host(**spec: Any) -> Simulation:
    """A run on a volume that only one host can mount at a time, here n1."""
    simulation = make(**spec)
    with simulation.by_others():
        modes = {"spec": {"accessModes": ["ReadWriteOnce"]}}
        simulation.store.change("persistentvolumeclaims", "ns", "run", modes)
    return simulation


def move(simulation: Simulation, host: str) -> None:
    for name in simulation.pods():
        simulation.store.change("pods", "ns", name, {"spec": {"nodeName": host}})


def demanded(simulation: Simulation, name: str) -> list[str]:
    """Return the hosts on which a pod may run."""
    affinity = pod(simulation, name)["spec"].get("affinity") or {}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = affinity.get("nodeAffinity", {}).get(key, {}).get("nodeSelectorTerms", [])
    return [host for term in terms for one in term["matchFields"] for host in one["values"]]


def test_a_pod_that_waits_for_the_host_of_a_volume_follows_the_nodes_to_another_host() -> (
    None
):
    simulation = make_on_one_host()
    publish(simulation, 2)
    assert demanded(simulation, "run-evaluate-2-0") == ["n1"]
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"]
    move(simulation, "n2")
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-1"]
    assert demanded(simulation, "run-evaluate-2-1") == ["n2"]
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-1"]


def test_after_the_end_of_the_run_a_pod_does_not_wait_for_the_host_of_its_nodes() -> None:
    simulation = make_on_one_host()
    publish(simulation, 2)
    complete(simulation)
    assert simulation.status["phase"] == "Complete"
    (name,) = simulation.pods("evaluation")
    assert name != "run-evaluate-2-0" and demanded(simulation, name) == []
    simulation.settle()
    assert simulation.pods("evaluation") == [name]


def test_a_pod_that_kueue_holds_in_a_former_queue_moves_to_the_new_queue_of_the_run(
    simulation: Simulation,
) -> None:
    def enter(queue: str) -> None:
        labels = {"kueue.x-k8s.io/queue-name": queue}
        simulation.store.change("trainingruns", *KEY, {"metadata": {"labels": labels}})

    enter("old")
    publish(simulation, 2)
    gates = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    simulation.store.change("pods", "ns", "run-evaluate-2-0", {"spec": gates})
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"]
    enter("new")
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.pods("evaluation") == ["run-evaluate-2-1"]
    labels = pod(simulation, "run-evaluate-2-1")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "new"


# ---- a final state
# ------------------------------------------------------------------------------------------


def test_without_its_section_no_evaluation_is_shown_as_active_and_results_stay(
    simulation: Simulation,
) -> None:
    publish(simulation, 2)
    start(simulation)
    end(simulation, "run-evaluate-2-0", 2)
    publish(simulation, 4)
    start(simulation)
    assert shown(simulation)["state"] == "Evaluating"
    edit(simulation, evaluation=None)
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.pods("evaluation") == ["run-evaluate-2-0"], "it has ended"
    assert (shown(simulation)["state"], shown(simulation)["waiting"]) == ("UpToDate", 0)
    assert "no spec.evaluation" in shown(simulation)["message"]
    assert shown(simulation)["step"] == 2 and shown(simulation)["results"]


def test_after_a_final_end_the_status_says_that_nothing_is_evaluated() -> None:
    simulation = make(activeDeadlineSeconds=1000)
    publish(simulation, 2)
    simulation.now += 2000
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.status["reason"] == "DeadlineExceeded"
    assert shown(simulation)["message"] == (
        "nothing is evaluated after this end of the run (DeadlineExceeded)"
    )

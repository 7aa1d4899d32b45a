"""A separate pod prepares the data of a run with ``spec.preparation``, before any node is requested."""

import json
from typing import Any

import pytest
from fake_kubernetes.simulation import CONFIG, KEY, Simulation
from pod_security import violations

from evergrad_common.contract import ErrorKind, encode_termination
from evergrad_operator.core.objects.status_codec import decode, encode
from evergrad_operator.core.observe.observe import ApplyFailure
from evergrad_operator.core.observe.preparation import DataPreparation
from evergrad_operator.core.policies.waiting import explain_refusal

SECTION = {"resources": {"requests": {"cpu": "1500m"}, "limits": {"memory": "2Gi"}}}
REPORT = {
    "phase": "Preparing",
    "preparation": {
        "work": "tokenize",
        "source": "docs",
        "bytesDone": 250,
        "bytesTotal": 1000,
        "documents": 7,
        "tokens": 99,
    },
}


@pytest.fixture
def simulation() -> Simulation:
    simulation = Simulation()
    simulation.create_run(preparation=SECTION)
    simulation.settle()
    return simulation


def start(simulation: Simulation) -> None:
    simulation.start_pods()
    simulation.settle()


def suspend(simulation: Simulation) -> None:
    """All pods drain, as the coordinator confirms."""
    edit(simulation, suspend=True)
    simulation.settle()
    simulation.reap()
    nodes = {"min": 1, "max": 2, "ready": 0, "connected": 0, "members": []}
    simulation.train(nodes=nodes)
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.status["phase"] == "Suspended"


def termination_text(kind: ErrorKind, text: str) -> str:
    return encode_termination(kind, text).decode()


def pod(simulation: Simulation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = simulation.store.get("pods", "ns", name)
    return found


def edit(simulation: Simulation, **spec: Any) -> None:
    simulation.store.change("trainingruns", *KEY, {"spec": spec})


def test_nodes_and_coordinator_are_created_only_after_the_data_are_prepared(
    simulation: Simulation,
) -> None:
    assert simulation.pods("preparation") == ["run-prepare-0"]
    start(simulation)
    assert simulation.pods("preparation") == ["run-prepare-0"]
    assert simulation.pods() == [] and simulation.pods("coordinator") == []
    assert (simulation.status["phase"], simulation.status["reason"]) == ("Preparing",) * 2
    ready = {one["type"]: one["status"] for one in simulation.status["conditions"]}
    assert (ready["Ready"], ready["Reconciling"], ready["Stalled"]) == (
        "False",
        "True",
        "False",
    )

    simulation.end_pod("run-prepare-0")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.pods("coordinator") == ["run-coordinator-0"]
    assert simulation.pods("preparation") == ["run-prepare-0"]
    assert simulation.status["restarts"]["total"] == 0


def test_the_preparation_pod_has_its_own_resources_and_reads_the_folders_of_the_nodes(
    simulation: Simulation,
) -> None:
    raw = pod(simulation, "run-prepare-0")
    (container,) = raw["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "1500m"},
        "limits": {"memory": "2Gi"},
    }
    text = " ".join(container["args"])
    assert text.startswith("prepare /etc/evergrad/run/trainingrun.json ")
    assert "--base-directory /volume/run --prepared-directory /volume/.prepared" in text
    assert "--workers 2 --status-port 29401" in text, "a helper a CPU, rounded up"
    assert container["image"] == CONFIG.trainer_image
    assert raw["metadata"]["labels"]["evergrad.dev/role"] == "preparation"
    assert violations(raw) == []
    assert raw["spec"]["automountServiceAccountToken"] is False


def test_the_preparation_runs_where_its_own_selector_or_else_the_run_allows() -> None:
    template = {"nodeSelector": {"pool": "gpu"}}
    for section, expected in (
        (SECTION, {"pool": "gpu"}),
        ({**SECTION, "nodeSelector": {"pool": "cpu"}}, {"pool": "cpu"}),
        ({**SECTION, "nodeSelector": {}}, None),
    ):
        simulation = Simulation()
        simulation.create_run(preparation=section, template=template)
        simulation.settle()
        assert pod(simulation, "run-prepare-0")["spec"].get("nodeSelector") == expected


def test_the_status_shows_the_progress_of_the_preparation(simulation: Simulation) -> None:
    start(simulation)
    simulation.coordinators.answers[KEY] = REPORT
    simulation.now += 30
    simulation.settle()
    assert simulation.status["preparation"] == {**REPORT["preparation"], "percent": 25}  # type: ignore[dict-item]
    simulation.end_pod("run-prepare-0")
    simulation.settle()
    shown = simulation.status["preparation"]
    assert (shown["work"], shown["percent"], shown["bytesDone"]) == ("done", 100, 1000)
    assert simulation.status.get("progress", {}).get("step") is None


def test_preparation_progress_alone_is_written_every_ten_seconds_at_most(
    simulation: Simulation,
) -> None:
    start(simulation)
    before = len(simulation.store.writes)
    for done in range(40):
        values = {**REPORT["preparation"], "bytesDone": done}  # type: ignore[dict-item]
        simulation.coordinators.answers[KEY] = {"phase": "Preparing", "preparation": values}
        simulation.now += 1.0
        simulation.reconcile()
    assert 3 <= len(simulation.store.writes) - before <= 5


@pytest.mark.parametrize("how", ["killed", "deleted", "vanished"])
def test_a_lost_preparation_pod_is_replaced_and_resumes(
    simulation: Simulation, how: str
) -> None:
    start(simulation)
    if how == "killed":
        simulation.end_pod("run-prepare-0", 137)
    elif how == "deleted":
        with simulation.by_others():
            simulation.store.delete("pods", "ns", "run-prepare-0")
    else:
        simulation.store.remove("pods", "ns", "run-prepare-0")
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert "run-prepare-1" in simulation.pods("preparation")
    assert simulation.pods() == []
    assert simulation.status["restarts"]["total"] == 1
    start(simulation)
    simulation.end_pod("run-prepare-1")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_user_error_in_the_data_fails_the_run_with_the_message_of_the_command(
    simulation: Simulation,
) -> None:
    start(simulation)
    words = "docs.jsonl:7: is not valid JSON; a brace is missing. Correct the line."
    simulation.end_pod(
        "run-prepare-0", 64, message=termination_text(ErrorKind.INPUT, words)
    )
    simulation.settle()
    assert (simulation.status["phase"], simulation.status["reason"]) == (
        "Failed",
        "UserError",
    )
    assert (
        f"(pod run-prepare-0) ended with exit code 64: {words}"
        in simulation.status["message"]
    )
    assert simulation.pods() == [] and simulation.pods("coordinator") == []
    assert simulation.pods("preparation") == ["run-prepare-0"], "it was tried again"

    # The file was corrected: the same run retries.
    edit(simulation, restartNonce="again")
    simulation.settle()
    start(simulation)
    assert simulation.status["phase"] == "Preparing"
    simulation.end_pod("run-prepare-1")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_repeated_preparation_failures_end_the_run_at_the_limit_of_the_section_and_name_it(
    simulation: Simulation,
) -> None:
    for attempt in range(4):
        start(simulation)
        simulation.end_pod(f"run-prepare-{attempt}", 137, reason="OOMKilled")
        simulation.now += 1
        simulation.settle()
        assert simulation.pods() == []
        if attempt == 2:
            assert simulation.status["reason"] == "BackingOff"
        simulation.now += 120
        simulation.settle()
    assert simulation.status["phase"] == "Failed"
    assert simulation.status["reason"] == "OutOfMemory"
    assert "spec.preparation.resources.limits.memory" in simulation.status["message"]
    assert simulation.pods("preparation") and "run-prepare-4" not in simulation.pods(
        "preparation"
    )


@pytest.mark.parametrize("documents", [0, 7])
def test_finished_chunks_count_as_progress_and_a_long_life_does_not(
    simulation: Simulation, documents: int
) -> None:
    values = {**REPORT["preparation"], "documents": documents}  # type: ignore[dict-item]
    for attempt in range(4):
        start(simulation)
        simulation.coordinators.answers[KEY] = {"phase": "Preparing", "preparation": values}
        simulation.now += 3600
        simulation.settle()
        simulation.end_pod(f"run-prepare-{attempt}", 137, reason="OOMKilled")
        simulation.coordinators.answers.clear()
        simulation.settle()
        simulation.now += 120
        simulation.settle()
    assert simulation.status["phase"] == ("Preparing" if documents else "Failed")


def test_a_host_fault_counts_no_preparation_failure_and_the_next_pod_avoids_the_host(
    simulation: Simulation,
) -> None:
    start(simulation)
    text = termination_text(ErrorKind.ENVIRONMENT, "host n1: /volume: stale file handle")
    for attempt in range(5):
        simulation.end_pod(f"run-prepare-{attempt}", 70, message=text)
        simulation.settle()
        simulation.now += 400
        simulation.settle()
        start(simulation)
    assert simulation.status["failures"].get("withoutProgress", 0) == 0
    assert simulation.status["phase"] == "Preparing"
    assert simulation.status["restarts"]["byCause"] == {"HostFault": 5}
    placed = json.dumps(pod(simulation, "run-prepare-5")["spec"]["affinity"])
    assert '"NotIn"' in placed and '"n1"' in placed
    assert len(simulation.pods("preparation")) == 2, "older pods that ended are left"

    simulation.end_pod("run-prepare-5")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_suspension_deletes_the_pod_and_the_resumed_run_continues_the_preparation(
    simulation: Simulation,
) -> None:
    start(simulation)
    edit(simulation, suspend=True)
    simulation.settle()
    assert simulation.status["phase"] == "Suspending"
    simulation.reap()
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    assert simulation.pods("preparation") == []
    assert simulation.status["restarts"]["total"] == 0
    edit(simulation, suspend=False)
    simulation.settle()
    assert simulation.pods("preparation") == ["run-prepare-1"] and simulation.pods() == []


@pytest.mark.parametrize("change", ["suspend", "restart"])
def test_a_prepared_run_creates_no_further_preparation_pod(
    simulation: Simulation, change: str
) -> None:
    start(simulation)
    simulation.end_pod("run-prepare-0")
    simulation.settle()
    start(simulation)
    simulation.train()
    simulation.settle()
    if change == "restart":
        edit(simulation, restartNonce="b")
        for _ in range(5):
            simulation.settle()
            simulation.reap()
    else:
        suspend(simulation)
        assert simulation.pods("preparation") == []
        edit(simulation, suspend=False)
        simulation.settle()
    assert simulation.pods() == ["run-0-1", "run-1-1"]
    assert set(simulation.pods("preparation")) <= {"run-prepare-0"}


def test_new_evaluation_sources_are_prepared_when_no_node_exists(
    simulation: Simulation,
) -> None:
    start(simulation)
    simulation.end_pod("run-prepare-0")
    simulation.settle()
    start(simulation)
    simulation.train()
    simulation.settle()
    suspend(simulation)
    raw = simulation.store.get("trainingruns", *KEY)
    sources = [{"name": "wiki", "path": "/data/wiki.jsonl"}]
    training = {**raw["spec"]["training"], "evaluation": {"sources": sources}}
    edit(simulation, suspend=False, training=training)
    simulation.settle()
    assert simulation.pods("preparation") == ["run-prepare-1"] and simulation.pods() == []


def test_without_the_section_the_preparation_pod_is_deleted_and_nodes_are_created(
    simulation: Simulation,
) -> None:
    start(simulation)
    edit(simulation, preparation=None)
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.pods("preparation") == []
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_preparation_pod_that_the_operator_deletes_counts_no_restart(
    simulation: Simulation,
) -> None:
    start(simulation)
    edit(simulation, preparation=None)
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.status["restarts"]["total"] == 0
    assert not simulation.status.get("attempts")


def test_an_edit_of_the_prepared_data_deletes_the_pod_and_is_reported(
    simulation: Simulation,
) -> None:
    start(simulation)
    raw = simulation.store.get("trainingruns", *KEY)
    sources = [{"name": "wiki", "path": "/data/wiki.jsonl"}]
    training = {**raw["spec"]["training"], "evaluation": {"sources": sources}}
    edit(simulation, training=training)
    simulation.settle()
    assert simulation.status["phase"] == "Restarting"
    assert "the pod that prepares the data leaves" in simulation.status["message"]
    simulation.end_pod("run-prepare-0")
    simulation.reap()
    simulation.settle()
    # The result of the old pod belongs to the old file.
    assert simulation.pods("preparation") == ["run-prepare-1"] and simulation.pods() == []
    assert simulation.status["restarts"]["total"] == 0
    start(simulation)
    simulation.end_pod("run-prepare-1")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_run_that_is_deleted_during_preparation_gets_no_further_pod(
    simulation: Simulation,
) -> None:
    start(simulation)
    deleted = {"deletionTimestamp": "2027-01-15T08:00:00Z"}
    simulation.store.change("trainingruns", *KEY, {"metadata": deleted})
    simulation.settle()
    simulation.end_pod("run-prepare-0", 137)
    simulation.settle()
    assert simulation.pods("preparation") == ["run-prepare-0"] and simulation.pods() == []


def test_an_image_that_its_host_cannot_get_is_corrected_by_a_restart(
    simulation: Simulation,
) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    status = {"containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]}
    simulation.store.change("pods", "ns", "run-prepare-0", {"status": status})
    simulation.settle()
    assert simulation.status["reason"] == "ImagePullFailed"
    assert "the preparation (pod run-prepare-0)" in simulation.status["message"]
    simulation.now += 400
    simulation.settle()
    ready = {one["type"]: one["status"] for one in simulation.status["conditions"]}
    assert ready["Stalled"] == "True"

    edit(simulation, image="registry.example/trainer:2", restartNonce="b")
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.pods("preparation") == ["run-prepare-1"]
    (container,) = pod(simulation, "run-prepare-1")["spec"]["containers"]
    assert container["image"] == "registry.example/trainer:2"
    assert simulation.status["restarts"]["total"] == 0


def test_the_next_pod_requests_the_tag_if_a_host_has_the_image_by_its_tag_alone() -> None:
    image = "registry.example/trainer:1"
    simulation = Simulation()
    simulation.create_run(preparation=SECTION, image=image)
    simulation.settle()
    start(simulation)
    simulation.end_pod("run-prepare-0")
    simulation.settle()
    simulation.start_pods()
    digest = f"registry.example/trainer@sha256:{'a' * 64}"
    for name in simulation.pods():
        (container,) = pod(simulation, name)["status"]["containerStatuses"]
        status = {"containerStatuses": [{**container, "imageID": digest}]}
        simulation.store.change("pods", "ns", name, {"status": status})
    simulation.train()
    simulation.settle()
    suspend(simulation)
    raw = simulation.store.get("trainingruns", *KEY)
    sources = [{"name": "wiki", "path": "/data/wiki.jsonl"}]
    training = {**raw["spec"]["training"], "evaluation": {"sources": sources}}
    edit(simulation, suspend=False, training=training)
    simulation.settle()
    (container,) = pod(simulation, "run-prepare-1")["spec"]["containers"]
    assert container["image"] == digest

    waiting = {"reason": "ErrImagePull", "message": "not found"}
    status = {"containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]}
    simulation.store.change("pods", "ns", "run-prepare-1", {"status": status})
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.pods("preparation") == ["run-prepare-2"]
    (container,) = pod(simulation, "run-prepare-2")["spec"]["containers"]
    assert container["image"] == image


def test_failures_of_nodes_are_not_attributed_to_a_pending_preparation(
    simulation: Simulation,
) -> None:
    start(simulation)
    simulation.end_pod("run-prepare-0")
    simulation.settle()
    start(simulation)
    # Another release may compute another hash, and these nodes have failed before.
    notes = json.loads(simulation.status["memory"]["preparation"])
    status = {
        "memory": {"preparation": json.dumps({**notes, "prepared": "another"})},
        "failures": {"withoutProgress": 3},
    }
    simulation.store.change("trainingruns", *KEY, {"status": status})
    for name in simulation.pods():
        simulation.end_pod(name, 1)
    simulation.settle()
    assert simulation.status["phase"] == "Failed"
    assert simulation.status["message"].startswith("pods failed 4 times without progress")


def test_a_host_fault_after_a_long_preparation_counts_as_the_first_one(
    simulation: Simulation,
) -> None:
    text = termination_text(ErrorKind.ENVIRONMENT, "host n1: /volume: stale file handle")
    for attempt in range(8):
        start(simulation)
        simulation.now += 200
        simulation.settle()
        simulation.end_pod(f"run-prepare-{attempt}", 70, message=text)
        simulation.settle()
        assert f"run-prepare-{attempt + 1}" in simulation.pods("preparation"), "it waits"
    ready = {one["type"]: one["status"] for one in simulation.status["conditions"]}
    assert ready["Stalled"] == "False"


def test_the_preparation_uses_the_runtime_class_of_the_nodes_unless_it_has_its_own_hosts() -> (
    None
):
    for section, expected in (
        (SECTION, "gvisor"),
        ({"nodeSelector": {"pool": "cpu"}}, None),
    ):
        simulation = Simulation()
        simulation.create_run(preparation=section, template={"runtimeClassName": "gvisor"})
        simulation.settle()
        found = pod(simulation, "run-prepare-0")["spec"].get("runtimeClassName")
        assert found == expected


def test_a_refused_preparation_pod_is_reported_with_its_own_field() -> None:
    failed = "failed quota: q: must specify limits.cpu for: trainer"
    for run, name, expected in (
        ("run", "run-prepare-0", "spec.preparation.resources"),
        ("run", "run-evaluate-2-0", "spec.evaluation.resources"),
        ("run", "run-2-0", "spec.resources"),
        ("run-prepare", "run-prepare-2-0", "spec.resources"),
        ("run-evaluate", "run-evaluate-2-0", "spec.resources"),
        ("run-evaluate", "run-evaluate-evaluate-2-0", "spec.evaluation.resources"),
    ):
        failure = ApplyFailure("Pod", name, 403, "Forbidden", failed)
        assert f"Set these under {expected};" in explain_refusal(failure, run).message


def test_a_deadline_ends_the_preparation_too() -> None:
    simulation = Simulation()
    simulation.create_run(preparation=SECTION, activeDeadlineSeconds=100)
    simulation.settle()
    start(simulation)
    simulation.now += 101
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.status["reason"] == "DeadlineExceeded"
    assert simulation.pods("preparation") == []


def test_an_unschedulable_preparation_pod_is_explained_with_its_own_field(
    simulation: Simulation,
) -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: insufficient cpu",
    }
    simulation.store.change(
        "pods", "ns", "run-prepare-0", {"status": {"conditions": [condition]}}
    )
    simulation.settle()
    assert (simulation.status["phase"], simulation.status["reason"]) == (
        "Waiting",
        "Unschedulable",
    )
    message = simulation.status["message"]
    assert "the preparation (pod run-prepare-0): no node fits" in message
    assert "Lower spec.preparation.resources" in message


def test_the_preparation_notes_are_read_back_and_bounded() -> None:
    known = DataPreparation(attempt=3, is_recorded=True, prepared="abc")
    assert decode(DataPreparation, encode(known)) == known
    assert encode(DataPreparation()) == {}
    damaged = {"memory": {"preparation": "{["}}
    assert decode(DataPreparation, damaged) == DataPreparation()
    shown = {"work": "x" * 9999, "bytesDone": -1, "tokens": "no"}
    long = decode(DataPreparation, {"preparation": shown})
    assert len(long.work) <= 128 and (long.bytes_done, long.tokens) == (0, 0)

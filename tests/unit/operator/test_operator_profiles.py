"""The profile of a run: which profile it has, when it keeps it, and the effect of an invalid one."""

import asyncio
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulated_run
import yaml
from fake_kubernetes.simulation import CONFIG, KEY, Simulation
from pod_security import violations
from simulated_run import make_run

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.installation import Granted
from evergrad_operator.core.observe.profiles import (
    LONGEST_NOTE,
    NO_PROFILE,
    NamespaceProfile,
    RunProfile,
    find_kept,
    parse_profiles,
    resolve,
)
from evergrad_operator.core.observe.spec import SpecCache
from evergrad_operator.edge.cache import namespace_profiles
from evergrad_operator.edge.cache.namespace_profiles import parse_profile

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/plan_profile.yaml"
GPU = {"key": "gpu", "operator": "Exists"}


def profiles(**named: Any) -> str:
    return json.dumps(named)


def of(defaults: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"defaults": defaults, **more}


def texts(found: RunProfile) -> list[str]:
    return [str(one) for one in found.problems]


# ---- resolving ---------------------------------------------------------------------------------------------


def test_a_run_without_a_profile_records_that_it_has_none() -> None:
    found = resolve(make_run(), "", None)
    assert found == RunProfile() and found.note == "{}"
    status = {"recipeHash": "r", "memory": {"profile": found.note}}
    assert find_kept({**make_run(), "status": status}, "") == found


def test_a_run_gets_its_named_or_the_default_profile_overridden_by_the_namespace_profile() -> (
    None
):
    installation = profiles(default=of({"image": "a/a:1"}), big=of({"image": "b/b:1"}))
    assert resolve(make_run(), installation, None).defaults == {"image": "a/a:1"}
    own = NamespaceProfile({"defaults": {"ttlSecondsAfterFinished": 5}})
    found = resolve(make_run(profile="big"), installation, own)
    assert found.defaults == {"image": "b/b:1", "ttlSecondsAfterFinished": 5}
    assert found.text == "big, ConfigMap team/evergrad-profile" and found.problems == ()


def test_an_unknown_or_foreign_profile_is_refused_with_the_list_of_available_profiles() -> (
    None
):
    installation = profiles(
        default=of({}), big=of({}, namespaces=["other"]), small=of({}, namespaces=["team"])
    )
    said = "spec.profile: there is no profile '{}' for namespace team. Use one of: default, small."
    for name in ("huge", "big"):
        found = resolve(make_run(profile=name), installation, None)
        assert texts(found) == [said.format(name)] and found.note == "unsettled"
    assert resolve(make_run(profile="small"), installation, None).problems == ()


def test_a_default_profile_for_other_namespaces_does_not_apply_to_a_run_without_profile() -> (
    None
):
    installation = profiles(default=of({"image": "a/a:1"}, namespaces=["other"]))
    assert resolve(make_run(), installation, None) == RunProfile()


def test_the_message_names_the_file_that_has_the_problem() -> None:
    wrong = {"defaults": {"template": {"tolerations": [{"effect": "NoSchedul"}]}}}
    found = resolve(make_run(), profiles(default={"alows": {}}), NamespaceProfile(wrong))
    one, two = texts(found)
    assert one.startswith(
        "profile default of the installation (runs.profiles.default of the chart): alows: unknown key"
    )
    assert two.startswith(
        "ConfigMap team/evergrad-profile: defaults.template.tolerations[0].effect: "
        "'NoSchedul' is not one of NoSchedule"
    )


@pytest.mark.parametrize(
    "wrong", [7, "x", [], {"namespaces": 7}, {"defaults": [1]}, {"allows": 1}]
)
def test_a_malformed_profile_gives_a_message_and_no_crash(wrong: Any) -> None:
    found = resolve(make_run(), profiles(default=wrong), NamespaceProfile(wrong))
    assert len(found.problems) >= 2 and found.note == "unsettled"


def test_a_namespace_cannot_allow_more_than_the_installation() -> None:
    own = NamespaceProfile({"allows": {"rdma": ["rdma/x"]}})
    found = resolve(make_run(), profiles(default=of({})), own)
    assert found.rdma == ()
    assert (
        "ConfigMap team/evergrad-profile: allows: has no meaning in a namespace"
        in texts(found)[0]
    )


def test_profiles_too_large_for_the_status_are_refused() -> None:
    labels = {f"l{number}": "x" * 60 for number in range(100)}
    found = resolve(
        make_run(), profiles(default=of({"template": {"labels": labels}})), None
    )
    assert f"has room for {LONGEST_NOTE}" in texts(found)[0] and found.note == "unsettled"


@pytest.mark.parametrize("own", [None, NamespaceProfile({"defaults": {}})])
def test_granted_names_do_not_count_towards_the_size_of_the_profile(
    own: NamespaceProfile | None,
) -> None:
    def find(size: int) -> RunProfile:
        defaults = {
            "image": "a/" + "a" * 500,
            "template": {"annotations": {"n": "y" * size}},
        }
        return resolve(make_run(), profiles(default=of(defaults)), own)

    kept = {"defaults": find(0).defaults, "from": find(0).sources}
    room = LONGEST_NOTE - len(json.dumps(kept, separators=(",", ":")))
    assert find(room).problems == () and len(find(room + 1).problems) == 1
    # The API server accepts 8192 characters of a note.
    assert len(find(room).note) < 8192


@pytest.mark.parametrize("text", ["[]", "{", "7"])
def test_a_text_that_is_not_an_object_of_profiles_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_profiles(text)


# ---- keeping -----------------------------------------------------------------------------------------------


def test_a_run_keeps_its_profile_from_its_start_until_a_restart() -> None:
    found = RunProfile(
        {"image": "a/a:1"}, ("rdma/x",), ("default",), granted=Granted(frozenset({"a/a:1"}))
    )
    status = {"recipeHash": "r", "memory": {"profile": found.note}}
    assert find_kept(make_run(), "") is None
    assert find_kept({**make_run(), "status": status}, "") == found
    assert find_kept({**make_run(), "status": {"memory": status["memory"]}}, "") is None
    again = {**make_run(restartNonce="2"), "status": status}
    assert find_kept(again, "") is None
    assert find_kept({**again, "status": {**status, "phase": "Complete"}}, "") == found


def test_names_of_the_installation_profile_are_kept_apart_from_names_of_the_namespace_profile() -> (
    None
):
    fetch = {"name": "fetch", "image": "a/b:1", "command": ["sh"]}
    template = {"priorityClassName": "high", "initContainers": [fetch]}
    installation = profiles(default=of({"image": "a/a:1", "template": template}))
    own = {"image": "c/c:1", "template": {"priorityClassName": "low"}}
    found = resolve(make_run(), installation, NamespaceProfile({"defaults": own}))
    assert found.granted == Granted(frozenset({"a/b:1"}))
    status = {"recipeHash": "r", "memory": {"profile": found.note}}
    assert find_kept({**make_run(), "status": status}, "") == found


def test_a_run_from_before_profiles_has_no_profile_and_keeps_its_devices() -> None:
    raw = {**make_run(resources={"limits": {"rdma/x": 1}}), "status": {"recipeHash": "r"}}
    kept = find_kept(raw, "")
    assert kept is NO_PROFILE
    assert SpecCache().parse(raw, kept).parsed.problems == ()
    assert len(SpecCache().parse(raw, RunProfile()).parsed.problems) == 1


@pytest.mark.parametrize("note", ["unsettled", "[]", "{", '{"rdma":7}'])
def test_an_empty_or_damaged_profile_note_is_resolved_again(note: str) -> None:
    status = {"recipeHash": "r", "memory": {"profile": note}}
    assert find_kept({**make_run(), "status": status}, "") is None


# ---- pods --------------------------------------------------------------------------------------------------


def page_blocks() -> list[Any]:
    text = (ROOT / "docs/operate/profiles.md").read_text("utf-8")
    return [
        yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    ]


def test_the_example_of_the_profiles_page_produces_the_golden_pods() -> None:
    # To accept a change: GOLDEN=write make test PYTEST=tests/unit/operator/test_operator_profiles.py
    run, values, config_map = page_blocks()
    own = NamespaceProfile(yaml.safe_load(config_map["data"]["profile.yaml"]))
    metadata = make_run()["metadata"]
    run["metadata"] = {**metadata, **run["metadata"], "namespace": "team-a"}
    profile = resolve(run, json.dumps(values["runs"]["profiles"]), own)
    assert profile.problems == ()
    world = simulated_run.Simulation(run)
    world.profile = profile
    world.reconcile()
    pods = [
        one for one in world.plan.create if "-coordinator-" not in one["metadata"]["name"]
    ]
    built = json.loads(json.dumps({"claim": world.plan.claim, "node": pods[0]}))
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(
            "# A run of ten lines with the profiles of docs/operate/profiles.md; written by "
            "test_operator_profiles.py.\n" + yaml.safe_dump(built, sort_keys=False)
        )
    assert built == yaml.safe_load(GOLDEN.read_text())
    capabilities = built["node"]["spec"]["containers"][0]["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_memory_is_locked_only_with_an_allowed_device() -> None:
    for limits in ({}, {"nvidia.com/gpu": 1}):
        world = simulated_run.Simulation(make_run(resources={"limits": limits}))
        world.profile = RunProfile(rdma=("rdma/x",))
        world.reconcile()
        assert world.plan.create
        assert [violations(pod) for pod in world.plan.create] == [[]] * len(
            world.plan.create
        )


# ---- the operator ------------------------------------------------------------------------------------------


def begun(installation: str = "", **spec: Any) -> Simulation:
    simulation = Simulation(config=replace(CONFIG, profiles=installation))
    simulation.create_run(**spec)
    return simulation


def put_profile(simulation: Simulation, text: str) -> None:
    body = {
        "metadata": {"name": "evergrad-profile", "namespace": "ns"},
        "data": {"profile.yaml": text},
    }
    with simulation.by_others():
        if ("configmaps", "ns", "evergrad-profile") in simulation.store.objects:
            simulation.store.remove("configmaps", "ns", "evergrad-profile")
        simulation.store.create("configmaps", body)


def tolerations(simulation: Simulation, pod: str) -> list[Any]:
    found = simulation.store.get("pods", "ns", pod)["spec"]["tolerations"]
    return [
        one for one in found if not one.get("key", "").startswith("node.kubernetes.io/")
    ]


def train(simulation: Simulation) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    simulation.train()
    simulation.settle()


def test_a_run_keeps_its_profile_and_a_restart_takes_the_new_one() -> None:
    simulation = begun(profiles(default=of({"resources": {"requests": {"cpu": "100m"}}})))
    put_profile(
        simulation, "defaults: {template: {tolerations: [{key: gpu, operator: Exists}]}}"
    )
    train(simulation)
    assert tolerations(simulation, "run-0-0") == [GPU]
    container = simulation.store.get("pods", "ns", "run-0-0")["spec"]["containers"][0]
    assert container["resources"] == {"requests": {"cpu": "100m"}}
    assert simulation.status["profile"] == "default, ConfigMap ns/evergrad-profile"

    # Another profile, and another operator: nothing is written, and a replaced pod is unchanged.
    put_profile(
        simulation, "defaults: {template: {tolerations: [{key: other, operator: Exists}]}}"
    )
    simulation.config = replace(CONFIG, profiles=profiles(default=of({"image": "x/y:1"})))
    simulation.start_operator()
    before = len(simulation.store.writes)
    simulation.reconcile()
    assert simulation.store.writes[before:] == []
    simulation.end_pod("run-1-0", 1)
    simulation.now += 120
    simulation.settle()
    assert tolerations(simulation, "run-1-1") == [GPU]
    assert simulation.store.get("pods", "ns", "run-1-1")["spec"]["containers"][0][
        "image"
    ] == ("trainer:1")

    # After a restart, all pods have the current profiles.
    simulation.store.change("trainingruns", *KEY, {"spec": {"restartNonce": "2"}})
    for _ in range(4):
        simulation.settle()
        simulation.reap()
    simulation.settle()
    newest = simulation.pods()[0]
    assert [one["key"] for one in tolerations(simulation, newest)] == ["other"]
    assert (
        simulation.store.get("pods", "ns", newest)["spec"]["containers"][0]["image"]
        == "x/y:1"
    )


def test_the_namespace_profile_is_read_once_by_its_name() -> None:
    simulation = begun()
    simulation.reconcile()
    first = simulation.cluster.reads.count(("list", "configmaps"))
    simulation.start_pods()
    simulation.cluster.reads.clear()
    for _ in range(3):
        simulation.reconcile()
    assert first == 1
    assert simulation.status["memory"]["profile"] == "{}"


def test_a_restart_with_an_invalid_profile_can_be_reverted() -> None:
    simulation = begun()
    put_profile(
        simulation, "defaults: {template: {tolerations: [{key: gpu, operator: Exists}]}}"
    )
    train(simulation)
    before = simulation.status
    put_profile(simulation, "defalts: {}")
    simulation.store.change("trainingruns", *KEY, {"spec": {"restartNonce": "2"}})
    for _ in range(3):
        simulation.reconcile()
        simulation.now += 30
    held = simulation.status
    assert (held["reason"], simulation.pods()) == ("InvalidSpec", ["run-0-0", "run-1-0"])
    # Nothing is forgotten, and the restart has not happened.
    for key in ("memory", "image", "profile", "attempt", "restartNonce"):
        assert held.get(key) == before.get(key), key
    simulation.store.change("trainingruns", *KEY, {"spec": {"restartNonce": None}})
    simulation.settle()
    assert simulation.status["reason"] != "InvalidSpec"
    simulation.end_pod("run-1-0", 1)
    simulation.now += 120
    simulation.settle()
    assert tolerations(simulation, "run-1-1") == [GPU]

    # With the profile corrected, the restart uses it.
    put_profile(simulation, "defaults: {image: x/y:1}")
    simulation.store.change("trainingruns", *KEY, {"spec": {"restartNonce": "3"}})
    simulation.settle()
    assert simulation.status["restartNonce"] == "3"
    assert simulation.status["image"] == "x/y:1"


def test_an_invalid_profile_holds_the_run_until_it_is_corrected() -> None:
    simulation = begun()
    for text, said in (
        (
            "defaults: {imge: x}",
            "ConfigMap ns/evergrad-profile: defaults.imge: unknown key",
        ),
        ("defaults: [", "ConfigMap ns/evergrad-profile: profile.yaml:1"),
        ("7", "ConfigMap ns/evergrad-profile: is not a mapping"),
    ):
        put_profile(simulation, text)
        simulation.now += 30
        assert simulation.reconcile() == 30.0
        assert simulation.status["reason"] == "InvalidSpec"
        assert said in simulation.status["message"]
        assert simulation.pods() == [] and "recipeHash" not in simulation.status
    put_profile(simulation, "defaults: {image: x/y:1}")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.status["image"] == "x/y:1"


def test_an_invalid_profile_of_a_suspended_run_is_read_again_when_the_run_resumes() -> None:
    simulation = begun(suspend=True)
    put_profile(simulation, "defaults: {imge: x}")
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": False}})
    simulation.settle()
    assert simulation.status["reason"] == "InvalidSpec" and simulation.pods() == []
    put_profile(simulation, "defaults: {image: x/y:1}")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.status["image"] == "x/y:1"


def test_no_run_starts_if_the_profile_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = begun(resources={"limits": {"rdma/hca": 1}})
    allowed = profiles(default=of({}, allows={"rdma": ["rdma/hca"]}))
    simulation.config = replace(simulation.config, profiles=allowed)
    simulation.start_operator()
    answer = [ApiError(500, "InternalError", "etcd is away")]

    async def refuse(*_: Any, **__: Any) -> Any:
        raise answer[0]

    with monkeypatch.context() as patch:
        patch.setattr(simulation.cluster, "list_all", refuse)
        delay = simulation.reconcile()
        assert delay is not None and delay <= 2, "it is tried again by itself"
        assert simulation.status["reason"] == "ApiUnavailable"
        assert "ConfigMap evergrad-profile" in simulation.status["message"]
        assert "etcd is away" in simulation.status["message"]
        assert condition(simulation, "Stalled") == "False"

        answer[0] = ApiError(403, "Forbidden", "configmaps is forbidden")
        simulation.now += 10
        simulation.reconcile()
        assert simulation.status["reason"] == "AdmissionRefused"
        assert condition(simulation, "Stalled") == "True"
    assert simulation.pods() == simulation.pods("coordinator") == []
    simulation.now += 60
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.refused() == [] and simulation.status["profile"] == "default"


def condition(simulation: Simulation, kind: str) -> str:
    found = {one["type"]: one["status"] for one in simulation.status["conditions"]}
    return str(found[kind])


def test_devices_that_no_profile_allows_are_refused_before_a_pod_exists() -> None:
    simulation = begun(resources={"limits": {"rdma/hca": 1}})
    simulation.settle()
    assert simulation.status["reason"] == "InvalidSpec" and simulation.pods() == []
    assert (
        "spec.resources.limits['rdma/hca']: is not allowed" in simulation.status["message"]
    )


@pytest.mark.parametrize("section", ["resources", "preparation", "evaluation", "init"])
def test_no_container_of_a_run_requests_a_device_that_no_profile_allows(
    section: str,
) -> None:
    device = {"limits": {"rdma/hca": "1"}}
    asked: dict[str, Any] = {
        "resources": {"resources": device},
        "preparation": {"preparation": {"resources": device}},
        "evaluation": {"evaluation": {"resources": device}},
        "init": {"template": {"initContainers": [{"name": "probe", "resources": device}]}},
    }[section]
    raw = make_run(**asked)
    run = SpecCache().parse(raw, resolve(raw, "", None))
    # The recipe of this run evaluates while it trains, which is irrelevant for this test.
    found = [one for one in map(str, run.find_obstacles(has_begun=False)) if "rdma" in one]
    assert len(found) == 1
    assert "limits['rdma/hca']: is not allowed by the profile of the run" in found[0]
    allowed = profiles(default=of({}, allows={"rdma": ["rdma/hca"]}))
    run = SpecCache().parse(raw, resolve(raw, allowed, None))
    assert not any("rdma" in str(one) for one in run.find_obstacles(has_begun=False))


# ---- the cost of a namespace's profile ---------------------------------------------------------------------


def config_map(text: str, version: int) -> dict[str, Any]:
    metadata = {"name": "evergrad-profile", "uid": "c", "resourceVersion": str(version)}
    return {"metadata": metadata, "data": {"profile.yaml": text}}


def test_each_version_of_a_namespace_profile_is_parsed_once_for_all_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []
    real = namespace_profiles.parse_profile

    def count(text: Any) -> NamespaceProfile:
        parsed.append(threading.current_thread().name)
        return real(text)

    monkeypatch.setattr(namespace_profiles, "parse_profile", count)

    async def read() -> None:
        kept = namespace_profiles.NamespaceProfiles(begun().cluster)
        text = "defaults: {image: a/a:1}"
        first = await kept.read("team", config_map(text, 1))
        assert first.raw == {"defaults": {"image": "a/a:1"}} and first.problems == ()
        found = await asyncio.gather(
            *(kept.read("team", config_map(text, 1)) for _ in range(50))
        )
        assert all(one is first for one in found) and len(parsed) == 1
        wrong = await kept.read("team", config_map("defalts: {}", 2))
        assert wrong.problems and len(parsed) == 2
        assert (await kept.read("other", config_map("", 1))).raw == {} and len(parsed) == 3

    asyncio.run(read())
    # The event loop serves all namespaces.
    assert threading.main_thread().name not in parsed


def test_an_overlong_text_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was read")

    text = "defaults:\n  template:\n    labels:\n"
    text += "".join(f"      l{i}: v\n" for i in range(1000))
    fits = text[: namespace_profiles.LONGEST_TEXT]
    assert "problems" not in fits
    assert all("bytes" not in str(one) for one in parse_profile(fits).problems)
    monkeypatch.setattr(namespace_profiles, "parse_document", refuse)
    long = text.ljust(namespace_profiles.LONGEST_TEXT + 1)
    (problem,) = parse_profile(long).problems
    assert str(problem).startswith(
        "profile.yaml has 16385 bytes; a profile has at most 16384 bytes"
    ), problem


def test_a_profile_that_stays_invalid_is_read_less_frequently() -> None:
    world = simulated_run.Simulation(make_run())
    world.profile = resolve(make_run(), "", NamespaceProfile({"defalts": {}}))
    pauses = []
    for seconds in (0.0, 60.0, 540.0, 3600.0):
        world.age(seconds)
        pauses.append(world.reconcile().requeue_after)
    assert pauses == [30.0, 30.0, 150.0, 300.0]


def test_the_queue_of_a_profile_is_the_queue_of_its_pods() -> None:
    simulation = begun(profiles(default=of({"queueName": "gpus"})))
    simulation.reconcile()
    pods = [
        raw
        for raw in simulation.store.list("pods")
        if "-coordinator-" not in raw["metadata"]["name"]
    ]
    assert pods
    assert {raw["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for raw in pods} == {
        "gpus"
    }

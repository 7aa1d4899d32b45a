"""Images and priority classes that an installation allows, for every pod of a run, from any source."""

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes.simulation import CONFIG, KEY, Simulation
from simulated_run import make_run

from evergrad_operator.core.admission import find_problems
from evergrad_operator.core.objects.installation import Installation, find_refusals

IMAGES = ("registry.example.com/training/", "localhost/")
BOUNDED = replace(CONFIG, allowed_images=IMAGES, allowed_priority_classes=("low", "middle"))
GOOD, BAD = "registry.example.com/training/a:1", "evil.example.com/training/a:1"


def fetcher(image: str | None) -> dict[str, Any]:
    named = {} if image is None else {"image": image}
    return {"name": "fetch", "command": ["sh"], **named}


def begun(config: Any = BOUNDED, profile: str = "", **spec: Any) -> Simulation:
    """A run after its first passes. ``profile``: profile of its namespace."""
    simulation = Simulation(config=config)
    simulation.create_run(**spec)
    put_profile(simulation, profile)
    simulation.settle()
    return simulation


def put_profile(simulation: Simulation, text: str) -> None:
    name = "evergrad-profile"
    body = {
        "metadata": {"name": name, "namespace": "ns"},
        "data": {"profile.yaml": text},
    }
    with simulation.by_others():
        if ("configmaps", "ns", name) in simulation.store.objects:
            simulation.store.remove("configmaps", "ns", name)
        simulation.store.create("configmaps", body)


# ---- values of a run
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"image": BAD},
            (
                f"spec.image: '{BAD}' is not an image that this installation allows; "
                "they begin with registry.example.com/training/, localhost/. Use one of these, "
                "or have it added to admissionPolicy.allowedImages of the chart."
            ),
        ),
        (
            {
                "template": {
                    "initContainers": [fetcher(GOOD), {**fetcher(BAD), "name": "b"}]
                }
            },
            (
                f"spec.template.initContainers[1].image: '{BAD}' is not an image that this "
                "installation allows; they begin with registry.example.com/training/, localhost/. "
                "Use one of these, or have it added to admissionPolicy.allowedImages of the chart."
            ),
        ),
        (
            {"template": {"priorityClassName": "high"}},
            (
                "spec.template.priorityClassName: 'high' is not a priority class that this "
                "installation allows; it allows low, middle. Use one of these, or have it added to "
                "admissionPolicy.allowedPriorityClasses of the chart."
            ),
        ),
    ],
)
def test_a_forbidden_image_or_class_is_refused_by_webhook_and_before_the_first_pod(
    spec: dict[str, Any], message: str
) -> None:
    (problem,) = find_problems(make_run(**spec), None, BOUNDED.installation)
    assert str(problem) == message
    simulation = begun(**spec)
    assert simulation.pods() == []
    assert simulation.status["reason"] == "InvalidSpec"
    assert simulation.status["message"] == message


def test_an_image_is_allowed_by_prefix_and_a_class_by_its_whole_name() -> None:
    rules = BOUNDED.installation
    template = {"priorityClassName": "low", "initContainers": [fetcher("localhost/x:1")]}
    assert find_refusals(make_run(image=GOOD, template=template), rules) == ()
    for spec in (
        {"image": "x/localhost/y:1"},
        {"image": "registry.example.com/training"},
        {"template": {"priorityClassName": "lowest"}},
    ):
        assert len(find_refusals(make_run(**spec), rules)) == 1, spec


def test_the_installation_image_is_allowed_if_the_run_sets_no_image() -> None:
    simulation = begun(template={"initContainers": [fetcher(None)]})
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_an_installation_without_lists_allows_all_images_and_classes() -> None:
    template = {"priorityClassName": "high", "initContainers": [fetcher(BAD)]}
    assert find_refusals(make_run(image=BAD, template=template), Installation()) == ()


@pytest.mark.parametrize(
    "template", [7, {"initContainers": 7}, {"initContainers": [7, {"image": 7}]}]
)
def test_a_malformed_template_is_left_to_the_manifest_validation(template: Any) -> None:
    assert find_refusals(make_run(template=template), BOUNDED.installation) == ()


# ---- profiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defaults", "path"),
    [
        ({"image": BAD}, "image"),
        (
            {"template": {"initContainers": [fetcher(BAD)]}},
            "template.initContainers[0].image",
        ),
        (
            {"template": {"priorityClassName": "high"}},
            "template.priorityClassName",
        ),
    ],
)
def test_a_namespace_profile_may_set_only_what_its_runs_may_set(
    defaults: dict[str, Any], path: str
) -> None:
    simulation = begun(profile=json.dumps({"defaults": defaults}))
    assert simulation.pods() == []
    assert simulation.status["reason"] == "InvalidSpec"
    said = f"ConfigMap ns/evergrad-profile: defaults.{path}: '"
    assert simulation.status["message"].startswith(said)

    # No watch event shows the correction.
    put_profile(simulation, json.dumps({"defaults": {"image": GOOD}}))
    simulation.now += 30
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def of_installation(**defaults: Any) -> Any:
    return replace(BOUNDED, profiles=json.dumps({"default": {"defaults": defaults}}))


def test_an_installation_profile_may_set_more_for_runs_that_have_started_too() -> None:
    template = {"priorityClassName": "high", "initContainers": [fetcher(BAD)]}
    simulation = begun(of_installation(image=BAD, template=template))
    assert simulation.pods() == ["run-0-0", "run-1-0"]

    # The run keeps the values that it began with, even if the profile changes.
    simulation.start_pods()
    simulation.settle()
    simulation.config = BOUNDED
    simulation.start_operator()
    simulation.settle()
    simulation.end_pod("run-1-0", 1)
    simulation.now += 120
    simulation.settle()
    pod = simulation.store.get("pods", "ns", "run-1-1")["spec"]
    assert (pod["initContainers"][0]["image"], pod["priorityClassName"]) == (BAD, "high")


def test_a_value_allowed_by_one_installation_profile_is_refused_to_runs_of_another() -> (
    None
):
    named = {"big": {"defaults": {"image": BAD}}, "default": {}}
    config = replace(BOUNDED, profiles=json.dumps(named))
    for spec, pods in (({"profile": "big"}, ["run-0-0", "run-1-0"]), ({"image": BAD}, [])):
        simulation = Simulation(config=config)
        simulation.create_run(**spec)
        simulation.settle()
        assert simulation.pods() == pods, spec
    # The name of an image does not allow a class.
    config = of_installation(template={"priorityClassName": "high"})
    assert begun(config, image="high").pods() == []


def train(simulation: Simulation) -> None:
    simulation.start_pods()
    simulation.settle()
    simulation.train()
    simulation.settle()
    assert simulation.status["phase"] == "Running"


def take_earlier_note(simulation: Simulation) -> None:
    """Give the run the note of an operator from before the lists applied to profiles."""
    memory = simulation.store.objects[("trainingruns", *KEY)]["status"]["memory"]
    note = json.loads(memory["profile"])
    of_then = {key: note[key] for key in ("defaults", "rdma", "from") if key in note}
    memory["profile"] = json.dumps(of_then, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("own", ["", "defaults: {ttlSecondsAfterFinished: 5}"])
def test_a_run_of_an_earlier_version_may_use_values_of_its_installation_profile(
    own: str,
) -> None:
    template = {"priorityClassName": "high", "initContainers": [fetcher(BAD)]}
    config = of_installation(image=BAD, template=template)
    simulation = begun(replace(config, allowed_images=()), own)
    train(simulation)
    take_earlier_note(simulation)
    for changed in (config, BOUNDED):
        # A value that was observed once is kept, even if the profile changes.
        simulation.config = changed
        simulation.start_operator()
        simulation.settle()
        assert simulation.status["phase"] == "Running", simulation.status["message"]
    simulation.end_pod("run-1-0", 1)
    simulation.now += 120
    simulation.settle()
    pod = simulation.store.get("pods", "ns", "run-1-1")["spec"]
    assert (pod["initContainers"][0]["image"], pod["priorityClassName"]) == (BAD, "high")


def test_a_run_of_an_earlier_version_may_not_use_values_of_its_namespace_profile_alone() -> (
    None
):
    config = of_installation(template={"initContainers": [fetcher("other.example.com/a")]})
    simulation = begun(
        replace(config, allowed_images=()), json.dumps({"defaults": {"image": BAD}})
    )
    train(simulation)
    take_earlier_note(simulation)
    simulation.config = config
    simulation.start_operator()
    simulation.settle()
    assert simulation.status["reason"] == "InvalidSpec"
    assert simulation.status["message"].startswith(f"spec.image: '{BAD}' is not an image")


# ---- runs that have started
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_of_profile", [False, True])
def test_a_shortened_list_stops_further_pods_of_affected_runs(
    is_of_profile: bool,
) -> None:
    named = {"image": BAD}
    simulation = begun(
        CONFIG,
        profile=json.dumps({"defaults": named}) if is_of_profile else "",
        **({} if is_of_profile else named),
    )
    train(simulation)
    simulation.config = BOUNDED
    simulation.start_operator()
    simulation.settle()
    # Running pods are left alone, as with a service account that is removed from its list.
    assert simulation.status["reason"] == "InvalidSpec"
    # Its image cannot change any more: the remedy must not name a change that the API server refuses.
    assert simulation.status["message"].endswith(
        "they begin with registry.example.com/training/, localhost/. Have it added to "
        "admissionPolicy.allowedImages of the chart, or make a new TrainingRun."
    )
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    simulation.end_pod("run-1-0", 1)
    simulation.now += 120
    simulation.settle()
    assert "run-1-1" not in simulation.pods()


def test_a_restart_refuses_an_image_that_only_the_namespace_profile_sets() -> None:
    simulation = begun()
    simulation.start_pods()
    simulation.settle()
    put_profile(simulation, json.dumps({"defaults": {"image": BAD}}))
    simulation.store.change("trainingruns", *KEY, {"spec": {"restartNonce": "2"}})
    for _ in range(4):
        simulation.settle()
        simulation.reap()
    assert simulation.status["reason"] == "InvalidSpec"
    images = {
        container["image"]
        for name in simulation.pods()
        for container in simulation.store.get("pods", "ns", name)["spec"]["containers"]
    }
    assert BAD not in images


def test_a_run_older_than_the_list_can_still_be_suspended_and_changed() -> None:
    status = {"recipeHash": "a" * 64}
    old = {**make_run(image=BAD), "status": status}
    for change in ({"suspend": True}, {"restartNonce": "2"}):
        new = {**make_run(image=BAD, **change), "status": status}
        assert find_problems(new, old, BOUNDED.installation) == ()
    other = {
        **make_run(image=BAD, template={"priorityClassName": "high"}),
        "status": status,
    }
    (problem,) = find_problems(other, old, BOUNDED.installation)
    assert problem.path == "spec.template.priorityClassName"


def test_a_run_that_the_list_keeps_from_starting_can_be_made_smaller() -> None:
    status = {"reason": "InvalidSpec"}
    old = {**make_run(image=BAD, nodes={"min": 1, "max": 2}), "status": status}
    new = {**make_run(image=BAD, nodes={"min": 1, "max": 1}), "status": status}
    assert find_problems(new, old, BOUNDED.installation) == ()
    # Another image that is not allowed is refused, and so are other mistakes, including old ones.
    new = {**make_run(image=f"{BAD}1", nodes={"min": 2, "max": 1}), "status": status}
    found = {one.path for one in find_problems(new, old, BOUNDED.installation)}
    assert found == {"spec.image", "spec.nodes.max"}
    assert find_problems({**new, "metadata": {**new["metadata"], "labels": {}}}, new) == ()
    again = {**new, "spec": {**new["spec"], "restartNonce": "2"}}
    (problem,) = find_problems(again, new, BOUNDED.installation)
    assert problem.path == "spec.nodes.max"

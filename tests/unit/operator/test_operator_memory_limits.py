"""The memory limit that ended a pod, and the origin of the limit; LimitRanges that refuse a pod."""

from simulated_run import Simulation

from evergrad_operator.core.objects.slim import slim_pod
from evergrad_operator.core.observe.observe import ApplyFailure
from evergrad_operator.core.policies.waiting import explain_refusal


def end_out_of_memory(note: str) -> str:
    world = Simulation().run()
    world.age(100)
    pod = world.pods["docs-lm-0-0"]
    pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "128Mi"}}
    pod["metadata"].setdefault("annotations", {})["kubernetes.io/limit-ranger"] = note
    world.end("docs-lm-0-0", 137, reason="OOMKilled")
    world.pods["docs-lm-0-0"] = dict(slim_pod(pod))
    world.settle()
    assert world.status["lastFailure"]["cause"] == "OutOfMemory"
    return str(world.status["lastFailure"]["message"])


def test_a_memory_limit_from_a_limit_range_is_named_with_its_source() -> None:
    note = "LimitRanger plugin set: cpu request for container trainer; memory limit for container trainer"
    assert end_out_of_memory(note) == (
        "its memory limit was 128Mi, from a LimitRange of the namespace, since the run sets none"
    )


def test_a_memory_limit_of_the_run_itself_is_named_alone() -> None:
    note = "LimitRanger plugin set: cpu limit for container trainer"
    assert end_out_of_memory(note) == "its memory limit was 128Mi"


def test_a_limit_range_that_refuses_the_coordinator_names_what_can_be_changed() -> None:
    said = (
        'pods "docs-lm-coordinator-0" is forbidden: maximum memory usage per Container is 200Mi, but limit '
        "is 256Mi"
    )
    failure = ApplyFailure(
        "Pod", "docs-lm-coordinator-0", 403, "Forbidden", said, verb="create"
    )
    obstacle = explain_refusal(failure, "docs-lm")
    assert obstacle.reason == "AdmissionRefused"
    assert obstacle.message.endswith(
        "Change the LimitRange of the namespace, or the chart's values runs.coordinator; it is tried again"
    )
    failure = ApplyFailure("Pod", "docs-lm-0-0", 403, "Forbidden", said, verb="create")
    assert (
        "or spec.resources.limits; it is tried again"
        in explain_refusal(failure, "docs-lm").message
    )

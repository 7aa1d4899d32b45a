"""Returns advice about a run: a few sentences with commands, chosen by its phase and reason. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from evergrad_cli.cluster.render.runs import NON_FINITE, Pod, Run
from evergrad_cli.cluster.render.text import age

# Longer than one replica of the operator needs to take over from another, so only a missing operator is
# reported.
_UNSEEN_SECONDS: Final = 30.0

_WHERE: Final[Mapping[str, str]] = {
    "ImagePullFailed": "kubectl get trun {name} -o jsonpath='{{.status.image}}'",
    "Unschedulable": "kubectl describe nodes",
    "QuotaExceeded": "kubectl describe resourcequota",
    "VolumePending": "kubectl describe pvc {claim}",
    "VolumeLost": "kubectl describe pvc {claim}",
    "BackingOff": "evergrad logs {name} --previous",
    "HostFaults": "kubectl describe node",
}
"""For each reason of a waiting run: the command that shows more, with the run's ``name`` and ``claim``.

The run's message, which the operator writes, has the obstacle and the remedy.
"""
_ANYWHERE: Final = "evergrad doctor"


def advise(run: Run, pods: Sequence[Pod] = (), *, now: float, place: str = "") -> list[str]:
    """Return the next actions for the user, the most important first.

    ``now`` in Unix seconds. Each command ends with ``place``, the result of ``given_place``.
    """
    # Check states that no other field can change first: a run that is deleted or over still has its last
    # phase.
    if run.is_deleting:
        if run.takes_claim:
            return [
                (
                    f"It is being deleted, and claim {run.claim} with its checkpoints is deleted with it "
                    "(storage.whenDeleted)."
                )
            ]
        return [f"It is being deleted. Claim {run.claim} keeps its checkpoints."]
    if run.managed_by:
        return [
            (
                f"{run.managed_by} manages this run (spec.managedBy): Evergrad's operator creates no "
                "pods for it."
            ),
            "Ask that controller. To train here, submit the file without the field under another name.",
        ]
    if not run.is_observed:
        return _unseen(run, now, place)
    if run.is_true("Complete"):
        folder = f"claim {run.claim}, folder {run.folder}"
        return [
            f"Report, checkpoints and complete.json are on the {folder}.",
            f"Its last output: evergrad logs {run.name}{place}",
        ]
    if run.has_failed:
        return _failed(run, place)

    # Check this before suspension: such a run is suspended, too, but would stop immediately after a resume.
    if run.is_beyond_its_stop:
        return [
            f"It has finished step {run.stop_after_step}, at which spec.training.stop.afterStep stops it.",
            (
                "To continue, raise or remove spec.training.stop.afterStep in its file, submit the file, "
                f"and then: evergrad resume {run.name}{place}"
            ),
        ]
    if run.reason == NON_FINITE:
        return _non_finite(run, place)
    if run.wants_suspension or run.phase == "Suspended":
        return [f"To continue where it stopped: evergrad resume {run.name}{place}"]

    # For most of these reasons the user can only look, so each answer is the command to look with.
    if run.phase == "Waiting":
        command = _WHERE.get(run.reason, _ANYWHERE).format(name=run.name, claim=run.claim)
        return [
            f"The message gives the cause and the remedy. See more: {command}{place}",
            *_where_to_look(pods, place),
        ]
    # Check this before the phases of a running run: if saves fail, the next failure loses the current
    # progress.
    healthy = run.condition("CheckpointHealthy")
    if healthy is not None and healthy.status == "False":
        return [
            f"Its state is not saved: {healthy.message or healthy.reason}",
            f"See the claim: kubectl describe pvc {run.claim}{place}",
        ]
    if run.phase == "Running":
        stale = run.condition("Progressing")
        is_stale = stale is not None and stale.status == "False"
        if stale is not None and is_stale and run.reason != "CoordinatorLost":
            return [
                (
                    f"No step for a long time ({stale.message or stale.reason}). Look at its output: "
                    f"evergrad logs {run.name} --all{place}"
                )
            ]
        return [f"Follow it: evergrad logs {run.name} -f{place}"]
    return [
        f"It is starting: evergrad wait {run.name} --for running{place}",
        *_where_to_look(pods, place),
    ]


def _non_finite(run: Run, place: str) -> list[str]:
    return [
        (
            "The loss or the gradient of a step was not finite; see which: "
            f"evergrad logs {run.name} --all{place}"
        ),
        (
            "Name it in spec.training.skipSteps, or allow some with "
            "spec.training.onNonFinite.skip, and submit the file again."
        ),
        f"Then continue from the state before it: evergrad resume {run.name}{place}",
    ]


def _unseen(run: Run, now: float, place: str) -> list[str]:
    waited = None if run.created is None else now - run.created
    if waited is not None and waited < _UNSEEN_SECONDS:
        return ["The operator has not processed it yet."]
    return [
        (
            f"No operator has processed it for {age(waited)}. Is one running, and does it watch this "
            f"namespace? evergrad doctor{place}"
        )
    ]


def _failed(run: Run, place: str) -> list[str]:
    # Name the node that failed first: the other nodes print only that they lost it.
    failure = run.last_failure
    node = (
        f" --node {failure.node}"
        if failure is not None and failure.node is not None
        else ""
    )
    return [
        f"See the output of what failed: evergrad logs {run.name}{node}{place}",
        (
            "Change what the message names; then continue from the newest checkpoint: "
            f"evergrad restart {run.name}{place}"
        ),
        "The recipe of a run cannot change. To use another recipe, submit the file under another name.",
    ]


def _where_to_look(pods: Sequence[Pod], place: str) -> list[str]:
    stuck = next(
        (pod for pod in pods if pod.message and not pod.is_ready and not pod.is_over), None
    )
    return (
        [f"More about a pod that waits: kubectl describe pod {stuck.name}{place}"]
        if stuck is not None
        else []
    )

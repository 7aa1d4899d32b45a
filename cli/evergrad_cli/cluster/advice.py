"""What to do next about a run: a few sentences with commands, from its phase and reason. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from evergrad_cli.cluster.runs import NON_FINITE, Condition, Pod, Run
from evergrad_cli.cluster.text import age

_UNSEEN_SECONDS: Final = 30.0

_WAITING: Final[Mapping[str, tuple[str, ...]]] = {
    "ImagePullFailed": (
        (
            "Check the image's name, and that the nodes may pull it: kubectl get trun {name} -o "
            "jsonpath='{{.status.image}}'"
        ),
        "A private registry needs spec.template.imagePullSecrets.",
        (
            "The image of a run does not change: delete the run and submit it again with another; "
            "its checkpoints stay."
        ),
    ),
    "Unschedulable": (
        "No node has room for what a pod asks for. See what is free: kubectl describe nodes",
        (
            "Lower spec.resources.requests or spec.nodes.min, ask less in spec.template, or add "
            "nodes; it goes on by itself."
        ),
    ),
    "Queued": ("A queue holds the pods until there is room; they start by themselves.",),
    "QuotaExceeded": (
        "See what is used and allowed: kubectl describe resourcequota",
        (
            "Lower spec.resources or spec.nodes, free some of the quota, or have it raised; it goes "
            "on by itself."
        ),
    ),
    "AdmissionRefused": (
        "A policy, LimitRange or webhook of the cluster refuses the pods; the message names it.",
        "Change what it names in spec.resources or spec.template, or ask who runs the cluster.",
    ),
    "InvalidObject": ("Correct the field that the message names in spec.template or spec.resources.",),
    "CreateFailed": ("The API server refuses what the operator creates. See what there is: evergrad doctor",),
    "VolumeMissing": (
        "Create the PersistentVolumeClaim {claim}, or name another in spec.storage.claimName of a new run.",
    ),
    "VolumePending": (
        "See why there is no volume yet: kubectl describe pvc {claim}",
        "Its storage class must exist and allow ReadWriteMany: evergrad doctor",
    ),
    "VolumeLost": ("The volume behind {claim} is gone: kubectl describe pvc {claim}",),
    "StartError": (
        (
            "A container cannot start; the message names what is missing, often a ConfigMap or "
            "Secret of spec.template."
        ),
    ),
    "InvalidSpec": ("Correct the field that the message names, and submit the file again.",),
    "WaitingForNodes": (
        "It trains again as soon as spec.nodes.min nodes are there; that may be lowered at any time.",
    ),
    "BackingOff": (
        "A replacement waits after failures. See why they failed: evergrad logs {name} --previous",
    ),
    "HostFaults": (
        (
            "Hosts fail the pods; the message names them. It costs no failure and is tried again, "
            "elsewhere if there is room."
        ),
        "See the hosts and the mounts of the pods: kubectl describe node, evergrad doctor",
    ),
    "VolumeRecordRefused": (
        "The claim {claim} does not take the run's record; the message says why and what helps.",
    ),
    "CoordinatorLost": ("Nothing: training goes on while the coordinator is replaced.",),
}
"""Reason of a run that waits → what helps, with the run's ``name``, ``claim`` and ``folder``."""

_FAILED: Final[Mapping[str, tuple[str, ...]]] = {
    "UserError": (
        "No retry cures wrong configuration or data. Correct the data, then: evergrad restart {name}",
        "Or correct the file and submit it under another name; the recipe of a run does not change.",
    ),
    "OutOfMemory": (
        "Raise spec.resources.limits.memory or lower batching.microBatchSize, then: evergrad restart {name}",
    ),
    "VolumeFull": (
        "Make the claim {claim} larger, or keep fewer checkpoints; then: evergrad restart {name}",
    ),
    "DeadlineExceeded": ("Raise spec.activeDeadlineSeconds, then: evergrad restart {name}",),
    "OutputConflict": (
        "Folder {folder} of the claim {claim} belongs to another run or recipe.",
        "Submit this one under another name, or with another spec.storage.path.",
    ),
}
"""Reason of a run that has failed → what helps."""
_OTHERWISE: Final = ("When the cause is mended, go on from the newest checkpoint: evergrad restart {name}",)


def advise(run: Run, pods: Sequence[Pod] = (), *, now: float) -> list[str]:
    """What to do next, most important first. ``now`` in Unix seconds."""
    if run.is_deleting:
        return ["It is being deleted. Its claim keeps the checkpoints."]
    if not run.is_observed:
        return _unseen(run, now)
    if run.is_true("Complete"):
        return _complete(run)
    if run.is_true("Failed"):
        return _failed(run)
    if run.is_beyond_its_stop:
        return [
            (
                f"It has finished step {run.stop_after_step}, where spec.training.stop has it stop. "
                "Its claim keeps the checkpoints."
            ),
            "To train on, delete the run and submit its file without spec.training.stop.",
        ]
    if run.reason == NON_FINITE:
        return [
            f"The loss or the gradient of a step was not finite; see which: evergrad logs {run.name} --all",
            (
                "Name it in spec.training.skipSteps, or allow some with "
                "spec.training.onNonFinite.skip, and submit the file again."
            ),
            f"Then go on from the state before it: evergrad resume {run.name}",
        ]
    if run.wants_suspension or run.phase == "Suspended":
        return [f"To go on where it stopped: evergrad resume {run.name}"]
    if run.reason in _WAITING:
        return [*_filled(_WAITING[run.reason], run), *_where_to_look(run, pods)]
    if run.phase == "Running":
        stale = _false(run, "Progressing")
        if stale is not None and run.reason != "CoordinatorLost":
            return [
                (
                    f"No step for long ({stale.message or stale.reason}). Look at its output: "
                    f"evergrad logs {run.name} --all"
                )
            ]
        return [f"Follow it: evergrad logs {run.name} -f"]
    return [f"It is on its way: evergrad wait {run.name} --for running", *_where_to_look(run, pods)]


def _filled(sentences: Sequence[str], run: Run) -> list[str]:
    return [sentence.format(name=run.name, claim=run.claim, folder=run.folder) for sentence in sentences]


def _false(run: Run, kind: str) -> Condition | None:
    condition = run.condition(kind)
    return condition if condition is not None and condition.status == "False" else None


def _unseen(run: Run, now: float) -> list[str]:
    waited = None if run.created is None else now - run.created
    if waited is not None and waited < _UNSEEN_SECONDS:
        return ["The operator has not looked at it yet."]
    return [
        (
            f"No operator has looked at it for {age(waited)}. Is one running, and does it watch this "
            "namespace? evergrad doctor"
        )
    ]


def _complete(run: Run) -> list[str]:
    place = f"claim {run.claim}, folder {run.folder}"
    return [
        f"Report, checkpoints and complete.json are on the {place}.",
        f"Its last output: evergrad logs {run.name}",
    ]


def _failed(run: Run) -> list[str]:
    failed = run.condition("Failed")
    reason = run.reason if run.reason in _FAILED else failed.reason if failed is not None else ""
    advice = _filled(_FAILED.get(reason, _OTHERWISE), run)
    failure = run.last_failure
    node = f" --node {failure.node}" if failure is not None and failure.node is not None else ""
    return [f"See the output of what failed: evergrad logs {run.name}{node}", *advice]


def _where_to_look(run: Run, pods: Sequence[Pod]) -> list[str]:
    stuck = next((pod for pod in pods if pod.message and not pod.is_ready and not pod.is_over), None)
    return [f"More about a pod that waits: kubectl describe pod {stuck.name}"] if stuck is not None else []

"""Finds the obstacle that keeps a run from training, and whether a person has to act.

The run continues without action as soon as the obstacle is gone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from evergrad_manifest.profile import NAMESPACE_PROFILE
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.kinds import API_RESOURCES, POD_GROUP, POD_GROUPS
from evergrad_operator.core.objects.names import Reason
from evergrad_operator.core.observe.observe import (
    BOUNDS_NOT_TAKEN,
    NAME_LEFT,
    NAME_TAKEN,
    ApplyFailure,
)
from evergrad_operator.core.observe.pod_messages import quote
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.gang import describe_wait, joins_pod_group

_START: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "StartError",
        "CrashLoopBackOff",
    }
)
_MISSING_CLAIM: Final = re.compile(
    r'persistentvolumeclaim "[^"]*" (?:not found|is being deleted)'
)
_PENDING_CLAIM: Final = re.compile(
    r"unbound immediate PersistentVolumeClaims|didn't find available persistent volumes"
)
_SLOW_SECONDS: Final = 120.0
_PERSON_AT_ONCE: Final = frozenset(
    {
        Reason.ADMISSION_REFUSED,
        Reason.INVALID_OBJECT,
        Reason.COORDINATOR_UNAUTHORIZED,
        Reason.GANG_UNAVAILABLE,
        Reason.NAME_TAKEN,
        Reason.VOLUME_LOST,
        Reason.VOLUME_RECORD_REFUSED,
    }
)
_PERSON_LATER: Final = frozenset(
    {
        Reason.COORDINATOR_UNREACHABLE,
        Reason.IMAGE_PULL_FAILED,
        Reason.START_ERROR,
        Reason.VOLUME_MISSING,
        Reason.VOLUME_PENDING,
    }
)
"""Reasons that usually resolve without action within ``PATIENCE_SECONDS``. For example, a registry recovers,
or a claim or a Secret is created shortly after the run.

Reasons in neither set resolve without a person: a queue admits the pods, an autoscaler adds nodes, or quota
becomes free.
"""
_LIMIT_RANGE: Final = re.compile(
    r"(?:maximum|minimum) \S+ usage per (?:Container|Pod) is |max limit to request ratio per "
)
"""Matches the API server's message about a container that a LimitRange of the namespace refuses."""
_NEEDED_BY_NAME: Final = ("Pod", "PersistentVolumeClaim")
"""Kinds for which a refusal counts only if the named object is wanted now. A refusal of another kind counts
until the object exists."""
PATIENCE_SECONDS: Final = 300.0
"""Time after which an obstacle that usually resolves without action needs a person. Most outages of a
registry are shorter."""


@dataclass(frozen=True)
class Obstacle:
    """One reason why the run does not train, with its remedy.

    ``since``: start of the obstacle in seconds since 1970, 0 if unknown. ``is_for_person``: whether only a
    person can resolve this obstacle, although other obstacles with the same reason resolve without action.
    """

    reason: Reason
    message: str
    since: float = 0.0
    is_for_person: bool = False

    @property
    def needs_person_at(self) -> float | None:
        """Time from which a person has to act, in seconds since 1970; None if no person is needed."""
        if self.reason in _PERSON_AT_ONCE or self.is_for_person:
            return self.since
        return self.since + PATIENCE_SECONDS if self.reason in _PERSON_LATER else None


def find_obstacle(context: ReconcileContext, wanted: Iterable[str]) -> Obstacle | None:
    """Return the most specific obstacle, or None.

    ``wanted``: names of the pods that should be created now, and of a claim that should be written.
    """
    # Check refusals of the API server first, because a pod that was refused has no state to inspect.
    names_wanted = frozenset(wanted)
    for failure in context.observation.failures:
        # Skip refusals of objects that are no longer needed: failures stay in the observation.
        if failure.verb not in ("create", "apply"):
            is_relevant = True
        elif failure.kind in _NEEDED_BY_NAME:
            is_relevant = failure.name in names_wanted
        else:
            is_relevant = (failure.kind, failure.name) not in context.observation.hashes
        if not is_relevant:
            continue
        if failure.reason == NAME_LEFT:
            return explain_leftovers(context)
        # An existing claim is written only to store the run's record.
        is_record = (failure.verb, failure.kind) == ("apply", "PersistentVolumeClaim")
        if is_record and context.observation.claim is not None and not _is_passing(failure):
            return _explain_record(failure)
        return explain_refusal(failure, context.run.name)

    # Then check pods that exist and do not run. Of several reasons, report the first one in _ORDER.
    coordinators = [pod for pod in context.observation.coordinators if pod.is_live]
    obstacles = []
    preparing = [pod for pod in context.preparing if pod.is_live]
    for pod in (*preparing, *coordinators, *context.live):
        found = None if pod.is_running else explain_pod(pod, context)
        if found is not None:
            obstacles.append(replace(found, since=pod.created_at))
    if obstacles:
        return min(obstacles, key=lambda one: _ORDER.index(one.reason))

    # Even if all pods run, the coordinator may be unreachable.
    silence = context.observation.unreachable
    if silence is None:
        return None
    return Obstacle(
        Reason(silence.reason),
        silence.text,
        context.now - silence.seconds,
    )


_ORDER: Final = (
    Reason.IMAGE_PULL_FAILED,
    Reason.START_ERROR,
    Reason.VOLUME_LOST,
    Reason.VOLUME_MISSING,
    Reason.VOLUME_PENDING,
    Reason.UNSCHEDULABLE,
    Reason.QUEUED,
    Reason.STARTING,
)


_LEFTOVER_KINDS: Final = "pods,services,configmaps,secrets,networkpolicies"
"""Kinds of a run's children, except the claim, because the claim contains the checkpoints."""
_MOST_LEFTOVERS: Final = 8
"""Maximum number of leftovers that a message lists. The command in the message removes all of them."""


def find_leftover_obstacle(context: ReconcileContext) -> Obstacle | None:
    """Return an obstacle if pods of an earlier run with the same name still exist; None otherwise.

    Such pods may still train and write to the same folder.
    """
    # If pods of this run are live, the leftovers did not prevent their creation.
    if not context.observation.leftovers or context.live:
        return None
    return explain_leftovers(context)


def explain_leftovers(context: ReconcileContext) -> Obstacle:
    """Return an obstacle that lists the known leftovers of an earlier run with the same name, and the command
    that deletes them."""
    run = context.run
    left = [f"Pod {name}" for name in context.observation.leftovers]
    left += [
        f"{one.kind} {one.name}"
        for one in context.observation.failures
        if one.reason == NAME_LEFT and one.kind != "Pod"
    ]
    shown = ", ".join(left[:_MOST_LEFTOVERS])
    if len(left) > _MOST_LEFTOVERS:
        shown += f" and {len(left) - _MOST_LEFTOVERS} more"
    # kubectl fails for a kind that the cluster does not have, so add PodGroups only if one is left.
    kinds = _LEFTOVER_KINDS
    if any(name.startswith(f"{POD_GROUP} ") for name in left):
        kinds += ",podgroups"
    selector = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_RUN}={run.name}"
    command = f"kubectl delete {kinds} -n {run.namespace} -l {selector}"
    text = (
        f"an earlier run {run.name}, which was deleted with --cascade=orphan, has left {shown}. No "
        f"pod is created before they are gone, since both would write in {run.volume_path}. Remove "
        "all of them with: "
        f"{command} (the claim with the checkpoints stays)"
    )
    return Obstacle(Reason.NAME_TAKEN, text)


@dataclass(frozen=True)
class _Refusal:
    """A refusal by the API server, recognised by its message or its status code.

    ``remedy`` may contain ``{resources}`` and ``{limits}``, the fields that set the resources of the refused
    pod and their limits.
    """

    reason: Reason
    remedy: str
    words: tuple[str, ...] = ()
    """Texts that all occur in the message."""
    pattern: re.Pattern[str] | None = None
    """Pattern that occurs in the message."""
    statuses: tuple[int, ...] = ()
    """Status codes, one of which the answer has. If there are none, any code matches."""

    def matches(self, failure: ApplyFailure) -> bool:
        return (
            all(word in failure.message for word in self.words)
            and (self.pattern is None or bool(self.pattern.search(failure.message)))
            and (not self.statuses or failure.status in self.statuses)
        )


_FREE_QUOTA: Final = "Free or raise the ResourceQuota"
_REFUSALS: Final = (
    _Refusal(Reason.QUOTA_EXCEEDED, _FREE_QUOTA, words=("exceeded quota",)),
    _Refusal(Reason.QUOTA_EXCEEDED, _FREE_QUOTA, words=("insufficient quota",)),
    _Refusal(
        Reason.ADMISSION_REFUSED,
        "Set these under {resources}",
        words=("must specify", "quota"),
    ),
    _Refusal(
        Reason.ADMISSION_REFUSED,
        "Remove from spec.template what the namespace's Pod Security level forbids",
        words=("violates PodSecurity",),
    ),
    _Refusal(
        Reason.ADMISSION_REFUSED,
        "Change the LimitRange of the namespace, or {limits}",
        pattern=_LIMIT_RANGE,
    ),
    _Refusal(
        Reason.INVALID_OBJECT, "Correct spec.template or {resources}", statuses=(422,)
    ),
    _Refusal(
        Reason.ADMISSION_REFUSED,
        "Change the run, or the policy or rights that forbid it",
        statuses=(400, 403),
    ),
)
"""Refusals by the API server; the first one that matches counts.

The message texts have no stable format, but a wrong match affects only the suggested remedy.
"""


def explain_refusal(failure: ApplyFailure, run: str) -> Obstacle:
    """Return the obstacle for a refusal by the API server or a coordinator. ``run``: name of the run."""
    what, said = f"{failure.kind} {failure.name}", failure.message
    if failure.reason == NAME_TAKEN:
        remedy = "Delete or rename it, or give the run another name"
        return Obstacle(
            Reason.NAME_TAKEN,
            f"{what} exists already and belongs to another owner. {remedy}; it is tried again",
        )
    if failure.reason == BOUNDS_NOT_TAKEN:
        return Obstacle(
            Reason.BOUNDS_NOT_TAKEN,
            f"the new bounds are not in force: {quote(said)}. They are sent again",
        )
    if _is_passing(failure):
        return _explain_passing(failure)

    # The API server has refused the object.
    text = f"the API server refuses {what}: {quote(said) or failure.reason} (HTTP {failure.status})"
    for refusal in _REFUSALS:
        if refusal.matches(failure):
            resources, limits = _find_resource_fields(failure, run)
            remedy = refusal.remedy.format(resources=resources, limits=limits)
            return Obstacle(refusal.reason, f"{text}. {remedy}; it is tried again")
    return Obstacle(Reason.CREATE_FAILED, f"{text}. It is tried again")


def _explain_passing(failure: ApplyFailure) -> Obstacle:
    """Return the obstacle for a transient failure: the object was not refused, and a retry may succeed."""
    could_not = f"could not {failure.verb} {failure.kind} {failure.name}"
    words = quote(failure.message) or failure.reason
    # A 409 for another reason than a taken name is a write conflict, which a retry resolves.
    if failure.status == 409:
        return Obstacle(Reason.STARTING, f"{could_not} yet: {words}. It is tried again")
    if "failed calling webhook" in failure.message:
        remedy = "See the webhook's pods and its failurePolicy; it is tried again"
        text = f"{could_not}: an admission webhook does not answer: {words}. {remedy}"
        return Obstacle(Reason.WEBHOOK_FAILED, text)
    code = f" (HTTP {failure.status})" if failure.status else ""
    text = f"{could_not}: the API server does not answer, or not now: {words}{code}"
    return Obstacle(Reason.API_UNAVAILABLE, f"{text}. It is tried again")


def _find_resource_fields(failure: ApplyFailure, run: str) -> tuple[str, str]:
    """Return the fields that set the resources of the refused pod, and the limits of these resources."""
    # Compare with names computed from the run's name: a node of a run called "x-evaluate" must not match.
    if failure.name.startswith(names.preparation_pod_name(run, 0).removesuffix("0")):
        field = "spec.preparation.resources"
    elif failure.name.startswith(names.evaluation_pod_name(run, 0, 0).removesuffix("0-0")):
        field = "spec.evaluation.resources"
    else:
        field = "spec.resources"
    if failure.name.startswith(names.coordinator_pod_name(run, 0).removesuffix("0")):
        # The installation sets the coordinator's resources; no field of the run changes them.
        return field, "the chart's values runs.coordinator"
    return field, f"{field}.limits"


def _is_passing(failure: ApplyFailure) -> bool:
    """Return whether the failure is transient: no answer, an overloaded server, or a write conflict."""
    return failure.status in (0, 401, 409, 429) or failure.status >= 500


def _explain_record(failure: ApplyFailure) -> Obstacle:
    """Return the obstacle for a refused write of the run's record to an existing claim.

    No pod is created before the record is written. Otherwise two runs could share a folder.
    """
    text = (
        f"the API server refuses the run's record on PersistentVolumeClaim {failure.name}: "
        f"{quote(failure.message) or failure.reason} (HTTP {failure.status}). No pod is created "
        "before it is written"
    )
    if "annotations" in failure.message and "long" in failure.message.lower():
        remedy = (
            f"Delete TrainingRuns that are over and use this claim, and annotations of it that begin with "
            f"{names.CLAIM_ANNOTATION_PREFIX} and name no run any more, or use another claim"
        )
    elif failure.status == 403:
        remedy = "Allow the operator to patch the claim: see its rights, quotas and admission policies"
    else:
        remedy = "Check why the API server or a webhook refuses an annotation of the claim"
    return Obstacle(Reason.VOLUME_RECORD_REFUSED, f"{text}. {remedy}; it is tried again")


_SMALLER_NODES: Final = (
    "Lower spec.resources, widen spec.template's node selection, or add nodes"
)
_ROLES: Final = {
    names.ROLE_COORDINATOR: ("the coordinator", _SMALLER_NODES),
    names.ROLE_PREPARATION: (
        "the preparation",
        (
            "Lower spec.preparation.resources or widen the node selection, and set "
            "spec.restartNonce to a new text; or add nodes"
        ),
    ),
    names.ROLE_EVALUATION: (
        "the evaluation",
        "Lower spec.evaluation.resources or widen the node selection, and delete the pod; or add nodes",
    ),
}
"""Name of a pod that is not a node, and the remedy if no host fits, by role."""
_REFUSED: Final = (
    "The scheduler tries again; where pods of one PodGroup differ in scheduler or priority, another "
    "spec.restartNonce creates all of them again"
)


def explain_pod(pod: PodState, context: ReconcileContext) -> Obstacle | None:
    """Return the obstacle that keeps a pod from running; None if there is none yet.

    For example, a pod whose containers have been in creation for less than ``_SLOW_SECONDS`` has no obstacle.
    """
    who, smaller = _ROLES.get(pod.role, (f"node {pod.index}", _SMALLER_NODES))
    where, said = f"{who} (pod {pod.name})", quote(pod.waiting_message)
    reason = pod.waiting_reason
    if pod.is_image_missing:
        remedy = "Check the image's name, the registry and spec.template.imagePullSecrets; it is tried again"
        return Obstacle(
            Reason.IMAGE_PULL_FAILED, f"{where}: {reason}: {said or 'no details'}. {remedy}"
        )
    if reason in _START:
        remedy = (
            "Check what spec.template refers to, such as Secrets and ConfigMaps, and the image's "
            "command; it is tried again"
        )
        return Obstacle(
            Reason.START_ERROR, f"{where}: {reason}: {said or 'no details'}. {remedy}"
        )
    if pod.place.is_gated:
        # If the pod is in no queue, only a person can resolve the obstacle, by naming a queue.
        has_queue = names.LABEL_QUEUE in context.run.labels or bool(pod.place.queue)
        text, is_for_person = describe_wait(pod, context, where), not has_queue
        return Obstacle(Reason.QUEUED, text, is_for_person=is_for_person)
    if reason == "SchedulingGated":
        return Obstacle(
            Reason.QUEUED,
            f"{where} waits to be admitted by a queue: {said or 'a scheduling gate is set'}",
        )
    # Only the scheduler's message shows that a claim is missing or not bound.
    if reason == "Unschedulable" and _MISSING_CLAIM.search(said):
        remedy = "Create the PersistentVolumeClaim; the pod waits for it"
        return Obstacle(Reason.VOLUME_MISSING, f"{where}: {said}. {remedy}")
    if reason == "Unschedulable" and _PENDING_CLAIM.search(said):
        remedy = "Check its StorageClass, which must allow writing from several nodes; the pod waits for it"
        return Obstacle(Reason.VOLUME_PENDING, f"{where}: {said}. {remedy}")
    if reason == "Unschedulable":
        return Obstacle(
            Reason.UNSCHEDULABLE,
            f"{where}: no node fits: {said or 'no details'}. {smaller}; the pod waits for them",
        )
    if reason == "SchedulerError":
        text = f"{where}: the scheduler refuses it: {said or 'no details'}. {_REFUSED}"
        return Obstacle(Reason.UNSCHEDULABLE, text)
    if (
        reason == "PodInitializing"
        and said
        and context.now - pod.created_at > _SLOW_SECONDS
    ):
        remedy = f"See kubectl logs {pod.name} -c, with its name; the pod waits for it"
        return Obstacle(Reason.STARTING, f"{where}: {said}. {remedy}")
    if reason == "ContainerCreating" and context.now - pod.created_at > _SLOW_SECONDS:
        remedy = (
            f"See kubectl describe pod {pod.name}: a volume, a Secret or a ConfigMap may be "
            "missing or slow"
        )
        return Obstacle(
            Reason.STARTING,
            f"{where} has been in creation for more than {int(_SLOW_SECONDS)} seconds. {remedy}",
        )
    return None


_MISSING_GROUP: Final = {
    "coscheduling": "Install the PodGroup and the scheduler of scheduler-plugins",
    "podGroup": "Enable the feature gate GenericWorkload and this API group, in Kubernetes 1.36 or later",
}
"""Remedy for a cluster without the PodGroup kind, by the installation's kind of gang."""


def find_group_obstacle(context: ReconcileContext) -> Obstacle | None:
    """Return an obstacle if the run's first pods need a PodGroup and the cluster lacks this kind; None
    otherwise.

    Without the PodGroup the scheduler would place the pods one by one, although the installation is set to
    gang scheduling.
    """
    is_missing = context.observation.group_kind is None
    if not is_missing or context.live or not joins_pod_group(context):
        return None
    # If the list of API resources could not be read, the kind may exist.
    for failure in context.observation.failures:
        if failure.kind == API_RESOURCES:
            return explain_refusal(failure, context.run.name)
    gang = context.config.gang
    group = POD_GROUPS[gang][0].version.partition("/")[0]
    text = (
        f"the API server has no PodGroup of {group}, which this installation uses to place the nodes of "
        "a run"
    )
    remedy = f"{_MISSING_GROUP[gang]}, or set runs.gang of the chart to none; it is looked for again"
    return Obstacle(Reason.GANG_UNAVAILABLE, f"{text}. {remedy}")


def find_profile_obstacle(context: ReconcileContext) -> Obstacle:
    """Return why the namespace's profile could not be read. A run does not begin without the profile."""
    for failure in context.observation.failures:
        if (failure.verb, failure.name) == ("list", NAMESPACE_PROFILE):
            return explain_refusal(failure, context.run.name)
    text = (
        f"ConfigMap {NAMESPACE_PROFILE} of namespace {context.run.namespace} was not read"
    )
    return Obstacle(Reason.API_UNAVAILABLE, f"{text}. It is tried again")


def find_claim_obstacle(context: ReconcileContext) -> Obstacle | None:
    """Return an obstacle if the PVC is missing, lost or being deleted; None otherwise."""
    claim, name = context.observation.claim, context.run.claim_name
    since = context.memory.start_time or context.now
    # The operator creates the run's own claim together with its pods. Only a claim that the user names in
    # spec.storage.claimName can be missing.
    if claim is None:
        if not context.run.spec.storage.claim_name:
            return None
        # If the claim could not be read, it may exist.
        for failure in context.observation.failures:
            if (failure.verb, failure.name) == ("get", name):
                return explain_refusal(failure, context.run.name)
        text = f"PersistentVolumeClaim {name} does not exist in namespace {context.run.namespace}"
        remedy = "Create it, or leave out spec.storage.claimName in a new TrainingRun"
        return Obstacle(Reason.VOLUME_MISSING, f"{text}. {remedy}", since)
    if claim.phase == "Lost":
        text = f"PersistentVolumeClaim {name} has lost its volume"
        return Obstacle(
            Reason.VOLUME_LOST,
            f"{text}. Restore the volume, or start a new TrainingRun on another",
            since,
        )
    # Kubernetes delays the deletion of a claim until no pod uses it.
    if claim.is_deleting and not context.live:
        text = f"PersistentVolumeClaim {name} is being deleted. Wait for that, or create another"
        return Obstacle(Reason.VOLUME_MISSING, text, since)
    return None

"""Builds the Observation of a run from raw objects. Every decision is based on an Observation. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from evergrad_manifest.model.claims import DROPPED_UNFINISHED, claims_of
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.kinds import POD_GROUP, Kind
from evergrad_operator.core.objects.raw import (
    get_float,
    get_map,
    get_maps,
    get_natural,
    get_text,
)
from evergrad_operator.core.objects.times import LATEST, parse_time
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.memory import Memory, parse_finish, parse_memory
from evergrad_operator.core.observe.pods import PodState, judge_image, parse_pod
from evergrad_operator.core.observe.preparation import PreparationReport
from evergrad_operator.core.observe.spec import ParsedRun

PreviousStatus = Memory
"""The typed view of ``status``. The operator has no other memory than the status that it wrote."""
ChildKey = tuple[str, str]
"""Kind and name of a child."""
NAME_TAKEN: Final = "NameTaken"
"""Reason of an ApplyFailure: an object with this name exists and does not belong to the run."""
NAME_LEFT: Final = "NameLeft"
"""Reason of an ApplyFailure: the name is taken by an ownerless object of an earlier run with the same
name."""
NAME_LEAVING: Final = "NameLeaving"
"""Reason of an ApplyFailure: an object of an older run with the same name exists and is being deleted."""
BOUNDS_NOT_TAKEN: Final = "BoundsNotTaken"
"""Reason of an ApplyFailure: the coordinator did not accept new bounds."""
MAX_RECORD: Final = 4096
"""Maximum length of a run's record on a PVC, in characters."""


@dataclass(frozen=True)
class ApplyFailure:
    """A request that failed at the last reconcile that sent it.

    ``status``: HTTP status code, or 0 without a response. ``at``: seconds since 1970. ``verb``: create,
    apply, delete, get or list; post for a request to the coordinator.
    """

    kind: str
    name: str
    status: int
    reason: str
    message: str
    at: float = 0.0
    verb: str = "create"


UNREACHABLE_SECONDS: Final = 60.0
"""Time without an answer after which a coordinator counts as unreachable. A start takes a few seconds."""


@dataclass(frozen=True)
class Silence:
    """A polled coordinator that does not answer.

    ``seconds``: time since the first failed poll after its last answer. ``attempt``: attempt of its pod.
    ``reason``: a Reason. ``message``: how the last poll failed. ``has_answered``: whether it answered before.
    ``has_timed_out``: whether there was no response at all. If a connection is refused, the host is alive and
    the kubelet restarts the coordinator. ``is_alone``: whether most other coordinators answer, which shows
    that the operator's network works.
    """

    attempt: int
    seconds: float
    reason: str
    message: str
    has_answered: bool
    has_timed_out: bool
    is_alone: bool

    @property
    def text(self) -> str:
        """A message about the silence, with the remedy."""
        if self.reason == names.Reason.COORDINATOR_UNAUTHORIZED:
            return self.message
        remedy = (
            "See its pod's log, and which network policies or service mesh keep the operator from "
            "the pod's address"
        )
        return f"{self.message}, for more than a minute. {remedy}; the operator tries again"


@dataclass(frozen=True)
class VolumeRecord:
    """A run's record on a PVC: its folder and recipe. ``created_at``: seconds since 1970, 0 if unknown."""

    run: str
    path: str
    recipe: str
    epoch: int
    uid: str = ""
    created_at: float = 0.0
    complete: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ClaimState:
    """The run's PVC.

    ``records``: records by name of the run. ``spec``: the current values of the spec fields that the operator
    applies. ``created_at``: seconds since 1970, None if unknown. ``dropped_unfinished``: number of records of
    incomplete runs that were dropped for lack of room. ``resource_version``: empty if unknown. ``is_ours``:
    whether the labels show that an operator created the claim.
    """

    name: str
    phase: str
    is_deleting: bool
    records: Mapping[str, VolumeRecord]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    created_at: float | None = None
    dropped_unfinished: int = 0
    resource_version: str = ""
    is_ours: bool = True


@dataclass(frozen=True)
class Other:
    """Another run whose folder on the same PVC overlaps with this run's folder.

    ``is_out``: whether the other run was refused, so that it stores no files there.
    """

    name: str
    uid: str
    path: str
    created_at: float
    is_out: bool


@dataclass(frozen=True)
class AppliedSettings:
    """The settings of a run's pods, read from the run's ConfigMap.

    ``hash``: hash of the settings that all nodes must share. ``changes``: every field that differs from the
    run's current spec, as "path: old → new".
    """

    hash: str
    changes: tuple[str, ...]

    @property
    def changes_hash(self) -> str:
        """Hash of the changes, so that a later pass can detect that an event listed them (may be empty)."""
        text = "\n".join(self.changes)
        return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


@dataclass(frozen=True)
class Observation:
    """One run with all its objects, at one point in time."""

    run: ParsedRun
    status: PreviousStatus
    nodes: tuple[PodState, ...]
    coordinators: tuple[PodState, ...]
    claim: ClaimState | None
    others: tuple[Other, ...]
    hashes: Mapping[ChildKey, str]
    """Hash of the applied manifest of each existing child that is not a pod."""
    progress: CoordinatorStatus | None
    failures: tuple[ApplyFailure, ...]
    claim_users: frozenset[str] | None = None
    """Names of all runs that store files on the claim or mount it; None if unknown."""
    silence: Silence | None = None
    applied: AppliedSettings | None = None
    """None unless the run was edited after its last status and its ConfigMap can be read."""
    preparations: tuple[PodState, ...] = ()
    report: PreparationReport | None = None
    """The status that the pod that prepares the data reports."""
    evaluations: tuple[PodState, ...] = ()
    group_kind: Kind | None = None
    """The kind of PodGroup that the installation uses; None if the API server does not have it."""
    group_priority: str = ""
    """The priority class with which the run's PodGroup was created."""
    group_restart: int = 0
    """The restart of the run at which its PodGroup was created."""
    troubled_hosts: tuple[str, ...] = ()
    """Hosts that recently caused failures of several runs of the installation."""
    leftovers: tuple[str, ...] = ()
    """Names of pods that an earlier run with the same name left behind. The deletion of that run with
    ``--cascade=orphan`` removed their owner."""
    gone: tuple[tuple[PodState, float], ...] = ()
    """Recently deleted pods in their last state, each with the seconds since its deletion."""
    leaving_since: Mapping[str, float] = field(default_factory=dict)
    """Time at which this process first observed the deletion of each pod, in seconds since 1970, by uid."""
    is_answer_new: bool = True
    """Whether the coordinator was polled after the newest end of a node's pod was observed. An older status
    may lack steps that were finished before the end."""

    @property
    def unreachable(self) -> Silence | None:
        """The silence of the run's live coordinator if it has lasted ``UNREACHABLE_SECONDS``; None
        otherwise."""
        silence, live = self.silence, self.live_coordinator
        if silence is None or live is None or live.attempt != silence.attempt:
            return None
        return silence if silence.seconds >= UNREACHABLE_SECONDS else None

    @property
    def is_coordinator_stranded(self) -> bool:
        """Whether Kueue holds the coordinator in no queue, or in a queue that the run no longer names."""
        live = self.live_coordinator
        return live is not None and live.place.is_stranded(self.run.queue)

    @property
    def live_coordinator(self) -> PodState | None:
        """The newest coordinator pod that runs or may still start, or None."""
        return max(
            (pod for pod in self.coordinators if pod.is_live),
            key=lambda pod: pod.attempt,
            default=None,
        )


def observe(
    run: ParsedRun,
    *,
    pods: Sequence[Mapping[str, Any]] = (),
    others: Sequence[Mapping[str, Any]] = (),
    children: Mapping[ChildKey, Mapping[str, Any]] | None = None,
    progress: CoordinatorStatus | None = None,
    failures: Sequence[ApplyFailure] = (),
) -> Observation:
    """Build the observation of a run.

    ``pods``, ``others``: raw pods and runs of the namespace. ``children``: existing objects by kind and name.
    Pods of other owners, runs on other PVCs and records that cannot be read are skipped.
    """
    children = children or {}
    claim = children.get(("PersistentVolumeClaim", run.claim_name))

    # Check the label and the owner, so that pods of an older run with the same name are not adopted.
    labelled = [
        raw
        for raw in pods
        if get_map(raw, "metadata", "labels").get(names.LABEL_RUN) == run.name
    ]
    leftovers = (parse_pod(raw) for raw in labelled if is_left_behind(run.name, raw))
    owned = (parse_pod(raw) for raw in labelled if owns(run.uid, raw))
    states = [state for state in owned if state is not None]
    # Policies rely on this order: the newest attempt of a node is its last pod.
    states.sort(key=lambda pod: (pod.index, pod.attempt))
    status = parse_memory(get_map(run.raw, "status"))
    nodes = tuple(
        judge_image(pod, status.image_id, restart=status.restart)
        for pod in states
        if pod.role == names.ROLE_NODE
    )

    # Accept the claim without an owner, because the user may have created it.
    hashes = {
        key: get_text(get_map(raw, "metadata", "annotations"), names.ANNOTATION_HASH)
        for key, raw in children.items()
        if raw is claim or owns(run.uid, raw)
    }
    overlapping = (_parse_other(raw, run) for raw in others)
    group = get_map(children.get((POD_GROUP, run.name), {}), "metadata", "annotations")
    restart = get_text(group, names.ANNOTATION_RESTART)
    return Observation(
        run=run,
        status=status,
        nodes=nodes,
        coordinators=tuple(pod for pod in states if pod.role == names.ROLE_COORDINATOR),
        claim=None if claim is None else _parse_claim(claim),
        others=tuple(other for other in overlapping if other is not None),
        hashes=hashes,
        progress=progress,
        failures=tuple(failures),
        leftovers=tuple(sorted(pod.name for pod in leftovers if pod is not None)),
        preparations=tuple(pod for pod in states if pod.role == names.ROLE_PREPARATION),
        evaluations=tuple(pod for pod in states if pod.role == names.ROLE_EVALUATION),
        group_priority=get_text(group, names.ANNOTATION_GROUP_PRIORITY),
        # Limit the length, because any client may set an annotation.
        group_restart=int(restart) if restart.isdecimal() and len(restart) < 10 else 0,
    )


def is_left_behind(run: str, raw: Mapping[str, Any]) -> bool:
    """Return whether an object belonged to an earlier run with this name and has no owner any more.

    The garbage collector does not delete such an object.
    """
    metadata, labels = get_map(raw, "metadata"), get_map(raw, "metadata", "labels")
    # Require both labels, which all objects of the operator have. A single label may come from another
    # client.
    is_ours = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    return (
        is_ours
        and labels.get(names.LABEL_RUN) == run
        and not metadata.get("ownerReferences")
    )


def observe_gone(
    run: ParsedRun, gone: Sequence[tuple[Mapping[str, Any], float]]
) -> tuple[tuple[PodState, float], ...]:
    """Return the run's pods among the recently deleted pods, each with the seconds since its deletion."""
    return tuple(
        (state, ago)
        for raw, ago in gone
        if owns(run.uid, raw) and (state := parse_pod(raw)) is not None
    )


def build_record(record: VolumeRecord) -> str:
    """Return a run's record as it is stored on the PVC, in compact JSON."""
    content = {
        "path": record.path,
        "recipe": record.recipe,
        "epoch": record.epoch,
        "uid": record.uid,
        "created": record.created_at,
    }
    if record.complete is not None:
        content["complete"] = dict(record.complete)
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


# ---- claims, others ----------------------------------------------------------------------------------------


def _parse_claim(raw: Mapping[str, Any]) -> ClaimState:
    """Parse a PVC and the records of runs in its annotations."""
    metadata, spec = get_map(raw, "metadata"), get_map(raw, "spec")
    annotations = {
        key: value
        for key, value in get_map(metadata, "annotations").items()
        if isinstance(value, str)
    }
    records = {}
    for key, value in annotations.items():
        if key.startswith(names.CLAIM_ANNOTATION_PREFIX):
            run = key.removeprefix(names.CLAIM_ANNOTATION_PREFIX)
            record = _parse_record(run, value)
            if record is not None:
                records[run] = record

    # Keep only these fields. The API server sets the others, and applying them again could change the claim.
    kept = ("accessModes", "resources", "storageClassName")
    return ClaimState(
        name=get_text(metadata, "name"),
        phase=get_text(get_map(raw, "status"), "phase"),
        is_deleting=metadata.get("deletionTimestamp") is not None,
        records=records,
        annotations=annotations,
        spec={key: spec[key] for key in kept if key in spec},
        created_at=parse_time(metadata.get("creationTimestamp")),
        dropped_unfinished=_parse_count(annotations.get(DROPPED_UNFINISHED, "")),
        resource_version=get_text(metadata, "resourceVersion"),
        is_ours=is_claim_ours(raw),
    )


def is_claim_ours(raw: Mapping[str, Any]) -> bool:
    """Return whether the labels of this raw claim show that an operator created it."""
    labels = get_map(raw, "metadata", "labels")
    is_managed = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    return is_managed and names.LABEL_RUN in labels


def is_deleted_with(
    run: ParsedRun, live: ClaimState | None, users: frozenset[str] | None
) -> bool:
    """Return whether the run should own its PVC, so that the garbage collector deletes it with the run.

    ``users``: names of the runs that store files on the PVC or mount it; None if unknown. False if unknown,
    because the PVC may contain the data of other runs.
    """
    storage = run.spec.storage
    if storage.when_deleted != "Delete" or storage.claim_name is not None or live is None:
        return False
    # Own only a claim that was created for this run. An earlier release did not record for which run it
    # created a claim: such a claim stays owned if it is owned already, and is not owned otherwise.
    made_for = live.annotations.get(names.ANNOTATION_MADE_FOR)
    is_made_for_it = made_for == run.uid
    if made_for is None and live.annotations.get(names.ANNOTATION_DELETED_WITH) == run.uid:
        is_made_for_it = live.created_at is not None and live.created_at >= run.created_at
    # Do not delete the data of other runs together with this run.
    others = {*live.records, *(users or ())} - {run.name}
    return is_made_for_it and users is not None and not others


def _parse_count(text: str) -> int:
    """Return the number in an annotation; 0 if the text is not a number."""
    # Limit the length, because any client may set an annotation.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


@lru_cache(maxsize=8192)
def _parse_record(run: str, text: str) -> VolumeRecord | None:
    """Parse a record; return None if the text is not a valid record.

    Results are cached, because each pass of each run reads the records of all runs on the same claim.
    """
    try:
        raw = json.loads(text) if len(text) <= MAX_RECORD else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("path"), str):
        return None
    epoch, complete = get_natural(raw, "epoch", most=names.MAX_EPOCH), raw.get("complete")
    end: dict[str, Any] | None = None
    if isinstance(complete, dict):
        # Keep only the fields that can be read, because they are copied to the run's status.
        at, step = complete.get("at"), get_natural(complete, "step")
        end = {} if parse_time(at) is None else {"at": at}
        end |= {} if step is None else {"step": step}
    return VolumeRecord(
        run=run,
        path=raw["path"],
        recipe=get_text(raw, "recipe"),
        epoch=-1 if epoch is None else epoch,
        uid=get_text(raw, "uid"),
        created_at=get_float(raw, "created", least=0, most=LATEST) or 0.0,
        complete=end,
    )


def _parse_other(raw: Mapping[str, Any], run: ParsedRun) -> Other | None:
    """Parse another run; return None if its folder does not overlap with this run's folder."""
    # Read only the names, the folder and the age, so that errors in another run's spec do not affect this
    # run.
    metadata = get_map(raw, "metadata")
    name = get_text(metadata, "name")
    claim, path = find_place(raw)
    if not name or name == run.name:
        return None
    if claim != run.claim_name or not overlap(path, run.volume_path):
        return None

    # A run that was refused because of its folder stores no files there.
    finish = parse_finish(get_map(raw, "status"))
    is_out = finish is not None and finish.reason == names.Reason.OUTPUT_CONFLICT
    created = parse_time(metadata.get("creationTimestamp")) or 0.0
    return Other(
        name=name,
        uid=get_text(metadata, "uid"),
        path=path,
        created_at=created,
        is_out=is_out,
    )


def find_place(raw: Mapping[str, Any]) -> tuple[str, str]:
    """Return the claim on which a raw run stores its files, and the folder on it.

    For example, ("shared", "team/run-1").
    """
    path = get_text(get_map(raw, "spec", "storage"), "path")
    path = path or get_text(get_map(raw, "metadata"), "name")
    # Normalize the path, so that two spellings of one folder compare as equal.
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return claims_of(raw).storage, "/".join(parts)


def overlap(one: str, other: str) -> bool:
    """Return whether two folders are the same, or one contains the other.

    For example, "a/b" overlaps with "a" but not with "a/bc".
    """
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def owns(uid: str, raw: Mapping[str, Any]) -> bool:
    """Return whether the object's owner is the run with this uid. A matching name is not enough."""
    owners = get_maps(get_map(raw, "metadata"), "ownerReferences")
    return any(one.get("uid") == uid for one in owners)

"""Raw objects of a run → one Observation, on which every decision rests. Pure."""

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
from evergrad_operator.core.observe.memory import Memory, parse_memory
from evergrad_operator.core.observe.pods import PodState, judge_image, parse_pod
from evergrad_operator.core.observe.preparation import PreparationReport
from evergrad_operator.core.observe.spec import ParsedRun

PreviousStatus = Memory
"""The typed view of ``status``: what the operator wrote there is what it remembers."""
ChildKey = tuple[str, str]
"""Kind and name."""
NAME_TAKEN: Final = "NameTaken"
NAME_LEFT: Final = "NameLeft"
"""The name is taken by an object that an earlier run of this name has left without an owner."""
"""Reason of an ApplyFailure: an object of that name exists, and is not the run's."""
NAME_LEAVING: Final = "NameLeaving"
"""Reason of an ApplyFailure: an object of an older run of the same name is there, and about to go."""
BOUNDS_NOT_TAKEN: Final = "BoundsNotTaken"
"""Reason of an ApplyFailure: the coordinator did not take new bounds."""
MAX_RECORD: Final = 4096
"""Longest record of a run on a PVC, in characters."""


@dataclass(frozen=True)
class ApplyFailure:
    """A step that the API server refused at the last reconcile that tried.

    ``status``: HTTP, 0 without an answer. ``at``: seconds since 1970. ``verb``: create, apply, delete, get,
    list, or post for a request to the coordinator.
    """

    kind: str
    name: str
    status: int
    reason: str
    message: str
    at: float = 0.0
    verb: str = "create"


UNREACHABLE_SECONDS: Final = 60.0
"""Silence after which a coordinator is called unreachable: starting it takes a few seconds."""


@dataclass(frozen=True)
class Silence:
    """A followed coordinator that does not answer. ``seconds``: since the first poll that failed after its
    last answer.

    ``attempt``: of its pod. ``reason``: a Reason. ``message``: how the last poll failed. ``has_answered``: it
    did before. ``has_timed_out``: nothing came back; where a connection was refused, its host is alive and
    the kubelet starts it again. ``is_alone``: most coordinators answer, so that it is not the operator that
    is cut off.
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
        """The silence in words, with what to do."""
        if self.reason == names.Reason.COORDINATOR_UNAUTHORIZED:
            return self.message
        remedy = (
            "See its pod's log, and which network policies or service mesh keep the operator from "
            "the pod's address"
        )
        return f"{self.message}, for a minute and more. {remedy}; it is asked again"


@dataclass(frozen=True)
class VolumeRecord:
    """A run's record on a PVC: its folder and recipe. ``created_at``: seconds since 1970, 0 where unknown."""

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

    ``records``: by name of the run. ``spec``: what we would apply again, as it stands there.
    ``created_at``: seconds since 1970, None where unknown. ``dropped_unfinished``: records of runs that were
    not complete and for which there was no room. ``resource_version``: empty where unknown. ``is_ours``: an
    operator made it, by its labels.
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
    """Another run whose folder on the same PVC overlaps.

    ``is_out``: it was refused, so it keeps nothing there.
    """

    name: str
    uid: str
    path: str
    created_at: float
    is_out: bool


@dataclass(frozen=True)
class AppliedSettings:
    """The settings that a run's pods were given, as its ConfigMap has them.

    ``hash``: of the settings that all nodes must share. ``changes``: every field that differs in the run now,
    as "path: old → new".
    """

    hash: str
    changes: tuple[str, ...]

    @property
    def changes_hash(self) -> str:
        """Hash of the changes, by which a later pass knows that an event named them; empty for none."""
        text = "\n".join(self.changes)
        return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


@dataclass(frozen=True)
class Observation:
    """One run with all that belongs to it, at one moment."""

    run: ParsedRun
    status: PreviousStatus
    nodes: tuple[PodState, ...]
    coordinators: tuple[PodState, ...]
    claim: ClaimState | None
    others: tuple[Other, ...]
    hashes: Mapping[ChildKey, str]
    """Applied hash of each live child that is not a pod."""
    progress: CoordinatorStatus | None
    failures: tuple[ApplyFailure, ...]
    claim_users: frozenset[str] | None = None
    """Names of all runs that keep their files on the claim or mount it; None where they are not known."""
    silence: Silence | None = None
    applied: AppliedSettings | None = None
    """None but for a run that has been edited since its last status and whose ConfigMap can be read."""
    preparations: tuple[PodState, ...] = ()
    report: PreparationReport | None = None
    """The answer of the pod that prepares the data."""
    evaluations: tuple[PodState, ...] = ()
    group_kind: Kind | None = None
    """The PodGroup that the installation's gangs are made of; None where the API server has none."""
    group_priority: str = ""
    """The priority class that the run's PodGroup was made with."""
    group_restart: int = 0
    """The restart of the run at which its PodGroup was made."""
    troubled_hosts: tuple[str, ...] = ()
    """Hosts that have lately failed several runs of the installation."""
    leftovers: tuple[str, ...] = ()
    """Names of pods that an earlier run of this name has left: its deletion with ``--cascade=orphan`` took
    their owner from them."""
    gone: tuple[tuple[PodState, float], ...] = ()
    """Pods that were deleted a moment ago, as they were last, and the seconds since then."""
    leaving_since: Mapping[str, float] = field(default_factory=dict)
    """When this process first saw each pod being deleted, in seconds since 1970, by uid."""
    is_answer_new: bool = True
    """Whether the coordinator's answer was asked for after the newest end of a node's pod was seen. An older
    answer may lack steps that were finished before the end."""

    @property
    def unreachable(self) -> Silence | None:
        """The silence of the coordinator that serves the run now, if it has lasted."""
        silence, live = self.silence, self.live_coordinator
        if silence is None or live is None or live.attempt != silence.attempt:
            return None
        return silence if silence.seconds >= UNREACHABLE_SECONDS else None

    @property
    def is_coordinator_stranded(self) -> bool:
        """Whether Kueue holds the coordinator in another queue than the run names by now, or in none."""
        live = self.live_coordinator
        return live is not None and live.place.is_stranded(self.run.queue)

    @property
    def live_coordinator(self) -> PodState | None:
        """The newest coordinator pod that serves or will."""
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
    """Observe a run. ``others``: runs of the namespace. ``children``: live objects by kind and name.

    Pods of other owners, runs on other PVCs and records that cannot be read are passed over.
    """
    children = children or {}
    claim = children.get(("PersistentVolumeClaim", run.claim_name))

    # A pod is the run's by its label and its owner, so that those of an older namesake are not taken over.
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

    # The claim may be the user's, and have no owner.
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
        # Bounded, because anybody may set an annotation.
        group_restart=int(restart) if restart.isdecimal() and len(restart) < 10 else 0,
    )


def is_left_behind(run: str, raw: Mapping[str, Any]) -> bool:
    """Whether an object was an earlier run's of this name and has no owner any more: no garbage collector
    takes it."""
    metadata, labels = get_map(raw, "metadata"), get_map(raw, "metadata", "labels")
    # A label alone may be anybody's: all that the operator makes has both.
    is_ours = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    return (
        is_ours
        and labels.get(names.LABEL_RUN) == run
        and not metadata.get("ownerReferences")
    )


def observe_gone(
    run: ParsedRun, gone: Sequence[tuple[Mapping[str, Any], float]]
) -> tuple[tuple[PodState, float], ...]:
    """Return the run's own of the pods that were deleted a moment ago, with the seconds since then."""
    return tuple(
        (state, ago)
        for raw, ago in gone
        if owns(run.uid, raw) and (state := parse_pod(raw)) is not None
    )


def build_record(record: VolumeRecord) -> str:
    """Return a run's record as the PVC carries it: compact JSON."""
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
    """Parse a PVC with the records that runs have left on it."""
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

    # Other fields are the API server's own: applying them again could change the claim.
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
    """Whether an operator made this raw claim, by its labels."""
    labels = get_map(raw, "metadata", "labels")
    is_managed = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    return is_managed and names.LABEL_RUN in labels


def is_deleted_with(
    run: ParsedRun, live: ClaimState | None, users: frozenset[str] | None
) -> bool:
    """Return whether the run shall own its PVC, so that the garbage collector deletes it with the run.

    ``users``: names of the runs that keep their files there or mount it, None if they are not known.
    """
    storage = run.spec.storage
    if storage.when_deleted != "Delete" or storage.claim_name is not None or live is None:
        return False
    # Any other claim was made by somebody else, or for an earlier run of this name. One of an earlier release
    # does not say whom it was made for: it stays owned, and is never owned later.
    made_for = live.annotations.get(names.ANNOTATION_MADE_FOR)
    is_made_for_it = made_for == run.uid
    if made_for is None and live.annotations.get(names.ANNOTATION_DELETED_WITH) == run.uid:
        is_made_for_it = live.created_at is not None and live.created_at >= run.created_at
    # Data of other runs do not go with this one.
    others = {*live.records, *(users or ())} - {run.name}
    return is_made_for_it and users is not None and not others


def _parse_count(text: str) -> int:
    """Return the number in an annotation; 0 for a text that is not one."""
    # Bounded, because anybody may set an annotation.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


@lru_cache(maxsize=8192)
def _parse_record(run: str, text: str) -> VolumeRecord | None:
    """Parse a record; None for a text that is none.

    Cached, because each pass of each run on a claim reads the records of all others there.
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
        # It goes into the run's status, without what cannot be read of it.
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
    """Parse another run; None where its folder does not overlap with this one's."""
    # Only names, place and age are read, so that another run's mistakes are not this one's.
    metadata = get_map(raw, "metadata")
    name = get_text(metadata, "name")
    claim, path = find_place(raw)
    if not name or name == run.name:
        return None
    if claim != run.claim_name or not overlap(path, run.volume_path):
        return None

    # A run that was refused for its folder keeps nothing there.
    finish = parse_memory(get_map(raw, "status")).finish
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
    """Return the claim that a raw run keeps its files on, and the folder there."""
    path = get_text(get_map(raw, "spec", "storage"), "path")
    path = path or get_text(get_map(raw, "metadata"), "name")
    # Two spellings of one folder must not pass for two folders.
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return claims_of(raw).storage, "/".join(parts)


def overlap(one: str, other: str) -> bool:
    """Whether two folders are the same, or one lies in the other."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def owns(uid: str, raw: Mapping[str, Any]) -> bool:
    """Whether the object belongs to the run of this uid; one that only has the right name does not."""
    owners = get_maps(get_map(raw, "metadata"), "ownerReferences")
    return any(one.get("uid") == uid for one in owners)

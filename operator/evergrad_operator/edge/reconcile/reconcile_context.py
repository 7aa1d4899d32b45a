"""One pass over one run, and the hints about the run that are kept between two passes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from evergrad_manifest.profile import NAMESPACE_PROFILE
from evergrad_operator.core.objects.kinds import (
    API_RESOURCES,
    CLAIM,
    CONFIG_MAP,
    POD,
    POD_GROUP,
    Kind,
    Raw,
)
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.observe.observe import AppliedSettings, Observation
from evergrad_operator.core.observe.profiles import NO_PROFILE, RunProfile
from evergrad_operator.edge.cache.claim_index import existing_claim
from evergrad_operator.edge.reconcile.refusals import Refusals, Step

STEP_OF_PROFILE: Final[Step] = ("list", CONFIG_MAP.kind, NAMESPACE_PROFILE)
"""The step that reads the profile of a run's namespace."""


@dataclass
class Applied:
    """Hints about a run's steps that are kept between two passes.

    They may be lost without harm, because they only save writes and requests.
    """

    refusals: Refusals = field(default_factory=Refusals)
    versions: dict[tuple[str, str], str] = field(default_factory=dict)
    """Resource versions after our own applies. If the version differs, another client changed the object."""
    is_in_doubt: bool = False
    """Whether a pod may exist that is not in the cache, because its creation was not answered."""
    is_unfinished: bool = False
    """Whether the last pass had too little time to start all steps."""
    token_posted_at: float = float("-inf")
    is_run_deleted: bool = False
    """Whether the operator has deleted the run at the end of its time to live.

    The watch may not have reported the deletion yet.
    """


@dataclass
class Hints:
    """Hints about a run that are kept between two passes.

    They may be lost without harm, because they only save writes and requests. Decisions depend only on the
    run's status.
    """

    uid: str = ""
    """The uid of the run. A new run may take the name before any pass notices that the old run is gone."""
    applied: Applied = field(default_factory=Applied)
    progress_written_at: float | None = None
    posted: set[str] = field(default_factory=set)
    """Texts of the events that this process has posted and must not post again."""
    silence_listed: float = 0.0
    """Seconds that the coordinator had been silent when the run's pods were listed for it."""
    ends: frozenset[str] = frozenset()
    """Uids of the nodes' pods that have ended."""
    ended_at: float = float("-inf")
    """Time at which the newest of these ends was first seen, on the clock of the polls."""
    asked_about: frozenset[str] = frozenset()
    """Uids of the nodes' pods that had ended when the coordinator was last polled because of ends."""
    leaving_since: dict[str, float] = field(default_factory=dict)
    """Time at which each pod was first seen being deleted, by uid.

    If an entry is lost, the operator waits longer for a pod on a host that does not answer.
    """

    def note_ends(self, seen: Observation, now: float) -> float:
        """Record the nodes' pods that have ended, and return the time at which the newest end was first seen.

        ``now``: time on the monotonic clock of the polls. It is never compared with the time of a host.
        """
        ends = frozenset(pod.uid for pod in seen.nodes if pod.end is not None)
        if not ends <= self.ends:
            self.ended_at = now
        self.ends = ends
        return self.ended_at

    def note_leaving(self, seen: Observation, now: float) -> Mapping[str, float]:
        """Record the pods that are being deleted.

        Returns, by uid, the time at which the deletion of each of these pods was first seen.
        """
        known = self.leaving_since
        pods = (*seen.nodes, *seen.preparations, *seen.evaluations)
        self.leaving_since = {
            pod.uid: known.get(pod.uid, now) for pod in pods if pod.is_deleting
        }
        return self.leaving_since


@dataclass(frozen=True)
class Pass:
    """One pass over the run ``key``. ``raw`` is the run as it was at the start of the pass."""

    key: Key
    raw: Raw
    hints: Hints
    applied: AppliedSettings | None = None
    """The settings that the pods use, or None if they have not been fetched."""
    group_kind: Kind | None = None
    """The PodGroup kind that the API server serves for this installation's gangs."""
    profile: RunProfile = NO_PROFILE
    reads_until: float = float("inf")
    """Latest end of all reads of this pass, on the event loop's clock."""

    @property
    def refusals(self) -> Refusals:
        """Steps that the API server has refused the run."""
        return self.hints.applied.refusals

    @property
    def generation(self) -> int:
        """The run's generation. A new generation makes every refused step retry."""
        return int(self.raw["metadata"].get("generation") or 0)


def list_reads(work: Pass, gang_group: str) -> tuple[Step, ...]:
    """Return the reads that a pass may need. Refusals of all other reads are dropped.

    ``gang_group``: API group of the installation's gangs, or "".
    """
    claim = existing_claim(work.raw)
    pods, groups = step_of_list(work.key), step_of_list(work.key, POD_GROUP)
    gangs = (groups, step_of_discovery(gang_group)) if gang_group else ()
    claims = () if claim is None else (step_of_claim(claim),)
    return pods, STEP_OF_PROFILE, *gangs, *claims


def step_of_discovery(group: str) -> Step:
    """Return the step that discovers which PodGroup version the API server serves in this API group."""
    return "get", API_RESOURCES, group


def step_of_claim(name: str) -> Step:
    """Return the step that fetches the existing claim that a run names."""
    return "get", CLAIM.kind, name


def step_of_list(key: Key, kind: str = POD.kind) -> Step:
    """Return the step that lists a run's pods, or its objects of another kind."""
    return "list", kind, key[1]

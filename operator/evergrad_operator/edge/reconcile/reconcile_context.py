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
    """Hints about a run's steps between two passes.

    All of them may be lost: they only save writes and tries.
    """

    refusals: Refusals = field(default_factory=Refusals)
    versions: dict[tuple[str, str], str] = field(default_factory=dict)
    """Resource versions that our own applies led to: another one means that somebody has changed the
    object."""
    is_in_doubt: bool = False
    """Whether a pod may exist that the cache does not have: the answer to its creation never came."""
    is_unfinished: bool = False
    """Whether the last pass had too little time to begin all steps."""
    token_posted_at: float = float("-inf")
    is_run_deleted: bool = False
    """Whether the run was deleted, its time to live being over, and the watch is yet to show it."""


@dataclass
class Hints:
    """Hints about a run between two passes.

    All of them may be lost: they only save writes and tries. Decisions rest on the run's status alone.
    """

    uid: str = ""
    """The run that they are about: another one may take its name before any pass sees that it is gone."""
    applied: Applied = field(default_factory=Applied)
    progress_written_at: float | None = None
    posted: set[str] = field(default_factory=set)
    """Texts of events that are posted once for each process."""
    silence_listed: float = 0.0
    """Seconds that the coordinator had been silent when the run's pods were listed for it."""
    ends: frozenset[str] = frozenset()
    """Nodes' pods, by uid, that are known to have ended."""
    ended_at: float = float("-inf")
    """When the newest of these ends was first seen, by the clock of the polls."""
    asked_about: frozenset[str] = frozenset()
    """Nodes' pods, by uid, that had ended before the coordinator was last asked about ends."""
    leaving_since: dict[str, float] = field(default_factory=dict)
    """When each pod was first seen being deleted, by uid. One that is lost lengthens the wait for a pod on a
    host that does not answer."""

    def note_ends(self, seen: Observation, now: float) -> float:
        """Note the nodes' pods that have ended, and return when the newest end was first seen.

        ``now``: by the clock of the polls, which only moves forward. It is compared with no time of a host.
        """
        ends = frozenset(pod.uid for pod in seen.nodes if pod.end is not None)
        if not ends <= self.ends:
            self.ended_at = now
        self.ends = ends
        return self.ended_at

    def note_leaving(self, seen: Observation, now: float) -> Mapping[str, float]:
        """Note the pods that are being deleted, and return when each was first seen so."""
        known = self.leaving_since
        pods = (*seen.nodes, *seen.preparations, *seen.evaluations)
        self.leaving_since = {
            pod.uid: known.get(pod.uid, now) for pod in pods if pod.is_deleting
        }
        return self.leaving_since


@dataclass(frozen=True)
class Pass:
    """One pass over the run ``key``, which was ``raw`` when it began."""

    key: Key
    raw: Raw
    hints: Hints
    applied: AppliedSettings | None = None
    """The settings of the pods, once they were fetched."""
    group_kind: Kind | None = None
    """The PodGroup that the API server has for this installation's gangs."""
    profile: RunProfile = NO_PROFILE
    reads_until: float = float("inf")
    """When no read of this pass waits any longer, by the event loop's clock."""

    @property
    def refusals(self) -> Refusals:
        """Steps that the API server has refused the run."""
        return self.hints.applied.refusals

    @property
    def generation(self) -> int:
        """The run's generation; a new one makes every refusal worth another try."""
        return int(self.raw["metadata"].get("generation") or 0)


def list_reads(work: Pass, gang_group: str) -> tuple[Step, ...]:
    """List the reads that a pass may need; a refusal of any other one is of no account any more.

    ``gang_group``: the API group of the installation's gangs, empty where it has none.
    """
    claim = existing_claim(work.raw)
    pods, groups = step_of_list(work.key), step_of_list(work.key, POD_GROUP)
    gangs = (groups, step_of_discovery(gang_group)) if gang_group else ()
    claims = () if claim is None else (step_of_claim(claim),)
    return pods, STEP_OF_PROFILE, *gangs, *claims


def step_of_discovery(group: str) -> Step:
    """Return the step that asks which PodGroup the API server has in this API group."""
    return "get", API_RESOURCES, group


def step_of_claim(name: str) -> Step:
    """Return the step that fetches the existing claim that a run names."""
    return "get", CLAIM.kind, name


def step_of_list(key: Key, kind: str = POD.kind) -> Step:
    """Return the step that lists a run's pods, or its objects of another kind."""
    return "list", kind, key[1]

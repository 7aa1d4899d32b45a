"""The objects of the informer cache, by resource and by the run they belong to. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.objects.slim import Raw, slim, slim_pod, slim_run
from evergrad_operator.edge.cache.facts_index import FactsIndex

RUNS: Final = "trainingruns"
PODS: Final = "pods"
CLAIMS: Final = "persistentvolumeclaims"
CHILDREN: Final = "children"
"""Children of a run that are neither pods nor its claim."""
GONE_SECONDS: Final = 60.0
"""Time for which the last state of a pod that is gone is kept: passes that count its time come at once."""
MAX_GONE: Final = 4096
"""Pods of one run that are kept so: as many as it may have nodes."""


class ObjectStore:
    """Objects as they were last seen, reduced to the parts that are read. The cache judges their versions."""

    def __init__(self) -> None:
        self.runs: dict[Key, Raw] = {}
        self.claims: dict[Key, Raw] = {}
        self._groups: dict[str, dict[Key, dict[Any, Raw]]] = {
            PODS: {},
            CHILDREN: {},
        }
        """Pods by name and other children by kind and name, under the run that their label names."""
        self.facts = FactsIndex()
        """What metrics show of runs and pods. It is brought up to date here, where all changes pass."""

    def pods(self, key: Key) -> Sequence[Raw]:
        """Return the run's pods, slimmed."""
        group = self._groups[PODS].get(key, {})
        return tuple(group.values())

    def children(self, key: Key) -> Mapping[tuple[str, str], Raw]:
        """Return the run's other children by kind and name: metadata is all that is kept of them."""
        return self._groups[CHILDREN].get(key, {})

    def known(self) -> set[Key]:
        """Return every run that exists, and every one that still has pods or children."""
        # A run that is gone is looked at once more, until nothing of it is left to forget.
        return {
            *self.runs,
            *self._groups[PODS],
            *self._groups[CHILDREN],
        }

    def count(self) -> Mapping[str, int]:
        """Count the objects of each resource."""
        pods = self._groups[PODS].values()
        children = self._groups[CHILDREN].values()
        return {
            RUNS: len(self.runs),
            PODS: sum(map(len, pods)),
            CLAIMS: len(self.claims),
            CHILDREN: sum(map(len, children)),
        }

    def find(self, resource: str, raw: Raw) -> Raw | None:
        """Return the object that is kept under the name of this one; its uid may be another."""
        if resource == RUNS:
            return self.runs.get(place_of(raw))
        if resource == CLAIMS:
            return self.claims.get(place_of(raw))
        group = self._groups[resource].get(_owner_of(raw), {})
        return group.get(_name_in(resource, raw))

    def put(self, resource: str, raw: Raw) -> None:
        """Keep an object in the place of the one that has its name."""
        if resource == RUNS:
            run = slim_run(raw)
            self.runs[place_of(raw)] = run
            self.facts.update_run(place_of(raw), run)
        elif resource == CLAIMS:
            self.claims[place_of(raw)] = slim(raw, ("spec", "status"))
        else:
            owner, name = _owner_of(raw), _name_in(resource, raw)
            group = self._groups[resource].setdefault(owner, {})
            if resource == PODS:
                pod = slim_pod(raw)
                self.facts.move_pod(owner, group.get(name), pod)
                group[name] = pod
            else:
                # They are only compared by hash and version: their specs would take memory for nothing.
                group[name] = slim(raw, ("kind",))

    def remove(self, resource: str, raw: Raw) -> None:
        """Drop the object that has this one's name."""
        if resource == RUNS:
            self.runs.pop(place_of(raw), None)
            self.facts.update_run(place_of(raw), None)
        elif resource == CLAIMS:
            self.claims.pop(place_of(raw), None)
        else:
            owner = _owner_of(raw)
            group = self._groups[resource].get(owner, {})
            gone = group.pop(_name_in(resource, raw), None)
            if resource == PODS and gone is not None:
                self.facts.move_pod(owner, gone, None)
            # A run counts as known for as long as it has a group, so that an empty one is dropped.
            if not group:
                self._groups[resource].pop(owner, None)

    def all(self, resource: str) -> Iterator[Raw]:
        """Return all objects of a resource that its list by label would show."""
        if resource == RUNS:
            yield from self.runs.values()
        elif resource == CLAIMS:
            # Claims that the user made bear no label of ours; each is fetched by its name.
            for claim in self.claims.values():
                if names.LABEL_RUN in get_map(claim, "metadata", "labels"):
                    yield claim
        else:
            for group in self._groups[resource].values():
                yield from group.values()


class GonePods:
    """The last states of pods that are gone: the time of an end is often seen only in the event of its going.

    ``now``: seconds of one clock.
    """

    def __init__(self) -> None:
        self._runs: dict[Key, dict[str, tuple[float, Raw | None]]] = {}
        """Time of the end and last state by run and uid; None for a state that is needed no more."""

    def note(self, raw: Raw, now: float) -> None:
        """Note that a pod is gone."""
        # The run comes last, so that those without a new one for long are the first.
        owner, identity = _owner_of(raw), uid_of(raw)
        kept = self._runs.pop(owner, {})
        self._runs[owner] = kept
        # The event that it is gone may follow an answer that says so, and shows more.
        since, known = kept.get(identity, (now, raw))
        kept[identity] = (since, None if known is None else slim_pod(raw))
        if len(kept) > MAX_GONE:
            del kept[next(iter(kept))]
        expired = [one for one, (at, _) in kept.items() if now - at >= GONE_SECONDS]
        for one in expired:
            del kept[one]
        oldest = next(iter(self._runs))
        if all(now - at >= GONE_SECONDS for at, _ in self._runs[oldest].values()):
            del self._runs[oldest]

    def find(self, key: Key, now: float) -> list[tuple[Raw, float]]:
        """Return the last state of the run's pods, with the seconds since their ends."""
        return [
            (raw, now - at)
            for at, raw in self._runs.get(key, {}).values()
            if raw is not None and now - at < GONE_SECONDS
        ]

    def drop(self, key: Key, uids: Iterable[str]) -> None:
        """Return these pods no more."""
        kept = self._runs.get(key, {})
        for uid in uids:
            if uid in kept:
                kept[uid] = (kept[uid][0], None)


def place_of(raw: Raw) -> Key:
    """Return the namespace and name of an object."""
    metadata = raw["metadata"]
    namespace = str(metadata.get("namespace", ""))
    return namespace, str(metadata.get("name", ""))


def uid_of(raw: Raw) -> str:
    """Return the uid of an object, empty where it has none."""
    return str(raw["metadata"].get("uid", ""))


def _owner_of(raw: Raw) -> Key:
    metadata = raw["metadata"]
    namespace = str(metadata.get("namespace", ""))
    return namespace, get_text(get_map(metadata, "labels"), names.LABEL_RUN)


def _name_in(resource: str, raw: Raw) -> Any:
    name = str(raw["metadata"].get("name", ""))
    if resource == PODS:
        return name
    # A run's other children are of several kinds and may share one name.
    return str(raw.get("kind", "")), name

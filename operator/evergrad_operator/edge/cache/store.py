"""Stores the objects of the informer cache by resource and by the run that they belong to. Pure."""

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
"""Name of the resource for all children of a run except its pods and its claim."""
GONE_SECONDS: Final = 60.0
"""Seconds for which the last state of a deleted pod is kept. The pass that counts its time follows sooner."""
MAX_GONE: Final = 4096
"""Maximum number of deleted pods that are kept per run. It equals the maximum number of nodes."""


class ObjectStore:
    """Objects as last seen, reduced to the used fields. ``InformerCache`` compares their versions."""

    def __init__(self) -> None:
        self.runs: dict[Key, Raw] = {}
        self.claims: dict[Key, Raw] = {}
        self._groups: dict[str, dict[Key, dict[Any, Raw]]] = {
            PODS: {},
            CHILDREN: {},
        }
        """By the run in their label: pods by name, and other children by kind and name."""
        self.facts = FactsIndex()
        """The facts for metrics of runs and pods. They are updated here, because all changes pass here."""

    def pods(self, key: Key) -> Sequence[Raw]:
        """Return the run's pods, reduced to the fields that are used."""
        group = self._groups[PODS].get(key, {})
        return tuple(group.values())

    def children(self, key: Key) -> Mapping[tuple[str, str], Raw]:
        """Return the run's other children by kind and name. Only their metadata is kept."""
        return self._groups[CHILDREN].get(key, {})

    def known(self) -> set[Key]:
        """Return every existing run, and every deleted run that still has pods or children."""
        # A deleted run is reconciled until none of its objects is left.
        return {
            *self.runs,
            *self._groups[PODS],
            *self._groups[CHILDREN],
        }

    def count(self) -> Mapping[str, int]:
        """Return the number of objects of each resource."""
        pods = self._groups[PODS].values()
        children = self._groups[CHILDREN].values()
        return {
            RUNS: len(self.runs),
            PODS: sum(map(len, pods)),
            CLAIMS: len(self.claims),
            CHILDREN: sum(map(len, children)),
        }

    def find(self, resource: str, raw: Raw) -> Raw | None:
        """Return the stored object with the name of ``raw``. Its uid may differ."""
        if resource == RUNS:
            return self.runs.get(place_of(raw))
        if resource == CLAIMS:
            return self.claims.get(place_of(raw))
        group = self._groups[resource].get(_owner_of(raw), {})
        return group.get(_name_in(resource, raw))

    def put(self, resource: str, raw: Raw) -> None:
        """Store an object. It replaces the stored object of the same name."""
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
                # Drop their specs to save memory, because they are compared only by hash and version.
                group[name] = slim(raw, ("kind",))

    def remove(self, resource: str, raw: Raw) -> None:
        """Drop the stored object with the name of ``raw``."""
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
            # Drop an empty group, because a run counts as known while it has a group.
            if not group:
                self._groups[resource].pop(owner, None)

    def all(self, resource: str) -> Iterator[Raw]:
        """Yield all objects of a resource that its list by label includes."""
        if resource == RUNS:
            yield from self.runs.values()
        elif resource == CLAIMS:
            # Claims of a user do not have our label. They are fetched by name and are not in the list.
            for claim in self.claims.values():
                if names.LABEL_RUN in get_map(claim, "metadata", "labels"):
                    yield claim
        else:
            for group in self._groups[resource].values():
                yield from group.values()


class GonePods:
    """The last states of deleted pods. The time of a pod's end is often known only from its deletion event.

    ``now``: seconds of one clock for all methods.
    """

    def __init__(self) -> None:
        self._runs: dict[Key, dict[str, tuple[float, Raw | None]]] = {}
        """Time of the deletion and last state, by run and uid. The state is None if it was dropped."""

    def note(self, raw: Raw, now: float) -> None:
        """Record the last state of a deleted pod."""
        # Move the run to the end, so that the run whose last deletion is the oldest comes first.
        owner, identity = _owner_of(raw), uid_of(raw)
        kept = self._runs.pop(owner, {})
        self._runs[owner] = kept
        # The deletion event may follow an answer that already reported the deletion, and has more fields.
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
        """Return the last states of the run's deleted pods, and the seconds since their deletion."""
        return [
            (raw, now - at)
            for at, raw in self._runs.get(key, {}).values()
            if raw is not None and now - at < GONE_SECONDS
        ]

    def drop(self, key: Key, uids: Iterable[str]) -> None:
        """Drop the states of these pods."""
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
    """Return the uid of an object, or ""."""
    return str(raw["metadata"].get("uid", ""))


def _owner_of(raw: Raw) -> Key:
    metadata = raw["metadata"]
    namespace = str(metadata.get("namespace", ""))
    return namespace, get_text(get_map(metadata, "labels"), names.LABEL_RUN)


def _name_in(resource: str, raw: Raw) -> Any:
    name = str(raw["metadata"].get("name", ""))
    if resource == PODS:
        return name
    # A run's other children have several kinds, and two of them may have the same name.
    return str(raw.get("kind", "")), name

"""The connected nodes, and the processes that may reconnect. Pure.

The newest incarnation of a node always wins; older incarnations are banned.
"""

from evergrad_common.contract import ExitCode
from evergrad_coordinator.protocol import End, Hello, Refused
from evergrad_coordinator.rules import admission
from evergrad_coordinator.rules.state import GroupSettings, Key, Node

REPLACED = End(
    ExitCode.STOPPED_SAVED, "replaced", "a newer process of this node has taken its place"
)


class Members:
    """The connected nodes, by name and by connection."""

    def __init__(self, settings: GroupSettings) -> None:
        self.nodes: dict[str, Node] = {}
        self.peers: dict[int, Node] = {}
        self.steps: dict[Key, int] = {}
        """Newest steps in the memory of nodes that are not connected."""
        self._settings = settings
        self._most = 4 * settings.max_members
        self._fingerprint: dict[str, str] | None = None
        self._incarnations: dict[str, str] = {}
        self._banned: dict[str, None] = {}

    def refuse(
        self, hello: Hello, *, finished: End | None, is_adopting: bool
    ) -> Refused | End | None:
        """Return the refusal of this hello, or None if it is accepted.

        After the end of the run, the run's own nodes receive ``finished``. Other nodes are refused.
        """
        # While a running group may be adopted, the fingerprint of its members counts, not the fingerprint of
        # a new node that connected earlier.
        is_first_member = (
            is_adopting
            and hello.had is not None
            and not any(node.group for node in self.nodes.values())
        )
        fingerprint = None if finished or is_first_member else self._fingerprint
        if refused := admission.refuse(hello, self._settings, fingerprint=fingerprint):
            return refused
        if finished:
            return finished
        # A replaced process may reconnect. If it were accepted, the two processes would replace each other.
        if hello.incarnation in self._banned:
            return REPLACED
        if hello.node not in self.nodes and len(self.nodes) >= self._settings.max_members:
            return admission.refuse_crowd(self._settings)
        return None

    def is_superseded_by(self, hello: Hello) -> bool:
        """Return whether the node reports a generation of a later epoch.

        Then another coordinator has replaced this one, which must not issue higher numbers.
        """
        # Without epochs, for example on one machine, the journal's lock prevents a second coordinator.
        newest = max(hello.known_generation, hello.had.generation if hello.had else 0)
        return self._settings.epoch > 0 and newest >> 32 > self._settings.epoch

    def claim(self, hello: Hello) -> Node | None:
        """Record this incarnation as the node's newest, and ban the previous one.

        Returns the connected node of this name, or None.
        """
        # Remove and insert again, so that the table first drops the nodes whose last hello is the oldest.
        known = self._incarnations.pop(hello.node, None)
        self._incarnations[hello.node] = hello.incarnation
        _forget_oldest(self._incarnations, self._most)
        if known is not None and known != hello.incarnation:
            self._banned[known] = None
            _forget_oldest(self._banned, self._most)
        return self.nodes.get(hello.node)

    def add(self, peer: int, hello: Hello, *, now: float) -> Node:
        """Add a connected node. If the same process was connected before, its known step is restored."""
        node = Node(
            peer,
            hello.node,
            hello.incarnation,
            hello.address,
            hello.workers,
            now,
            hello.fingerprint,
            had=hello.had,
        )
        node.step = self.steps.pop(node.key, None)
        node.group = hello.had.generation if hello.had else 0
        self._fingerprint = hello.fingerprint
        self.nodes[node.name] = self.peers[peer] = node
        return node

    def remove(self, node: Node) -> None:
        """Remove a node that is no longer connected, but keep its known step."""
        del self.peers[node.peer]
        del self.nodes[node.name]
        if node.step is not None:
            self.steps[node.key] = node.step
            _forget_oldest(self.steps, self._most)
        # The next node may have another image, so the first member decides the fingerprint again.
        if not self.nodes:
            self._fingerprint = None


def _forget_oldest(
    table: dict[str, str] | dict[str, None] | dict[Key, int], most: int
) -> None:
    # Nodes choose their names and incarnations, so the tables would grow without a bound.
    while len(table) > most:
        del table[next(iter(table))]  # type: ignore[arg-type]

"""Who is connected, and which processes may come back: newest incarnation of a node wins for good. Pure."""

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
        """Why this hello is not welcome; None if it is.

        After the end only a stranger is refused: the run's own nodes learn how it ended.
        """
        # While a living group is looked for, its members say what is equal, not a newcomer that was quicker.
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
        # A process that was replaced may ask again: the two would fight for the node's place.
        if hello.incarnation in self._banned:
            return REPLACED
        if hello.node not in self.nodes and len(self.nodes) >= self._settings.max_members:
            return admission.refuse_crowd(self._settings)
        return None

    def is_superseded_by(self, hello: Hello) -> bool:
        """Whether the node knows a number of a later epoch: this coordinator was replaced, and must not give
        out a higher one."""
        # Without epochs, as on one machine, the lock of the journal keeps a second coordinator away.
        newest = max(hello.known_generation, hello.had.generation if hello.had else 0)
        return self._settings.epoch > 0 and newest >> 32 > self._settings.epoch

    def claim(self, hello: Hello) -> Node | None:
        """Note that this incarnation is the node's newest; any other is banned.

        Returns the connected node that is in its way.
        """
        # Taken out and put in again: the table forgets the nodes first that have not come for longest.
        known = self._incarnations.pop(hello.node, None)
        self._incarnations[hello.node] = hello.incarnation
        _forget_oldest(self._incarnations, self._most)
        if known is not None and known != hello.incarnation:
            self._banned[known] = None
            _forget_oldest(self._banned, self._most)
        return self.nodes.get(hello.node)

    def add(self, peer: int, hello: Hello, *, now: float) -> Node:
        """Note a node that is here. The facts about its memory come back with the same process."""
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
        """Note that a node is not connected any more."""
        del self.peers[node.peer]
        del self.nodes[node.name]
        if node.step is not None:
            self.steps[node.key] = node.step
            _forget_oldest(self.steps, self._most)
        # The next node to come may be of another image: the first member decides again.
        if not self.nodes:
            self._fingerprint = None


def _forget_oldest(
    table: dict[str, str] | dict[str, None] | dict[Key, int], most: int
) -> None:
    # Nodes choose their names and incarnations: without a bound each new one would cost memory for ever.
    while len(table) > most:
        del table[next(iter(table))]  # type: ignore[arg-type]

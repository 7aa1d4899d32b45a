"""Simulates nodes, connections and time around the coordinator's pure rules, and checks the invariants.

A simulated node is a supervisor with its workers. A group trains a step when all its members can run. At each
step, the simulation checks that only the newest group trains.
"""

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from evergrad_coordinator.protocol import (
    Boundary,
    Broken,
    Capacity,
    Done,
    End,
    Go,
    Hello,
    Leave,
    Leaving,
    Left,
    Message,
    Ping,
    Placement,
    Plan,
    Progress,
    Ready,
    Refused,
    Result,
    Up,
    Welcome,
)
from evergrad_coordinator.rules import events
from evergrad_coordinator.rules.group import new_group
from evergrad_coordinator.rules.state import (
    Close,
    Finish,
    GroupSettings,
    Log,
    Persist,
    Send,
)
from evergrad_coordinator.rules.status import GroupCondition, describe_condition

TOKEN = "the run's token"
TICK = 0.1
QUICK = {
    "start_wait_seconds": 1.0,
    "silence_seconds": 0.6,
    "lease_seconds": 1.5,
    "ready_limit_seconds": 2.0,
    "soft_limit_seconds": 3.0,
    "up_limit_seconds": 2.0,
    "longest_hold_seconds": 2.0,
}
"""Short times for the simulation, in the same order of size as the defaults."""


def make_settings(**changes: Any) -> GroupSettings:
    """Return settings for 2 to 4 nodes, with 3 expected."""
    values: dict[str, Any] = {
        "run": "r",
        "min_nodes": 2,
        "max_nodes": 4,
        "expect": 3,
        "token": TOKEN,
        **QUICK,
        **changes,
    }
    return GroupSettings(**values)


@dataclass
class FakeNode:
    """One process of one node. ``auto``: the messages that it answers automatically."""

    cluster: "Cluster"
    name: str
    incarnation: str
    workers: int = 1
    step: int = -1
    peer: int | None = None
    group: Placement | None = None
    is_alive: bool = True
    is_frozen: bool = False
    is_cut: bool = False
    is_leaving: bool = False
    has_answered: bool = True
    """Whether the node answers plans and comes up after a Go message. False if it hangs."""
    known: int = 0
    ready_for: int = 0
    heard_at: float = 0.0
    retry_at: float = 0.0
    soft: Plan | None = None
    alone: int = 0
    """Number of ticks in an incomplete group."""
    outbox: deque[Message] = field(default_factory=deque)
    inbox: deque[Message] = field(default_factory=deque)
    received: list[Message] = field(default_factory=list)
    exit_code: int | None = None
    fingerprint: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """The node's name and incarnation."""
        return self.name, self.incarnation

    @property
    def can_run(self) -> bool:
        """Whether the workers make progress."""
        return self.is_alive and not self.is_frozen

    def connect(self) -> None:
        """Open a connection and send Hello."""
        cluster = self.cluster
        cluster.num_peers += 1
        self.peer = cluster.num_peers
        cluster.peers[self.peer] = self
        self.inbox.clear()
        self.outbox.clear()
        hello = Hello(
            "r",
            self.name,
            self.incarnation,
            f"10.0.0.{self.name}",
            self.workers,
            cluster.settings.recovery,
            self.fingerprint,
            token=cluster.settings.token,
            had=self.group,
            known_generation=self.known,
        )
        cluster.carry_out(events.on_hello(cluster.group, self.peer, hello, now=cluster.now))

    def disconnect(self) -> None:
        """Close the connection, and notify the coordinator."""
        peer, self.peer = self.peer, None
        self.retry_at = self.cluster.now + 0.15
        if peer is not None and self.cluster.peers.pop(peer, None) is not None:
            self.cluster.carry_out(
                events.on_lost(
                    self.cluster.group, peer, "connection closed", now=self.cluster.now
                )
            )

    def send(self, message: Message) -> None:
        """Send a message. If the node is cut off or frozen, queue it until the node acts again."""
        if self.peer is None or self.peer not in self.cluster.peers:
            return
        if self.is_cut or self.is_frozen:
            self.outbox.append(message)
        else:
            self.cluster.carry_out(
                events.on_message(
                    self.cluster.group, self.peer, message, now=self.cluster.now
                )
            )

    def get_ready(self, generation: int) -> None:
        """Take all workers out of their group, and get ready for ``generation``."""
        self.group, self.soft = None, None
        if self.peer is None:
            return
        self.ready_for = generation
        self.send(Ready(generation, self.workers, 1000 + int(self.name), self.step))

    def die(self, code: int | None = None) -> None:
        """End the process and its workers. If the node is cut off, the coordinator does not notice."""
        self.is_alive, self.group, self.exit_code = False, None, code
        if not self.is_cut:
            self.disconnect()
        else:
            self.peer = None

    def act(self) -> None:
        """Act for one tick."""
        now = self.cluster.now
        if not self.is_alive or self.is_frozen:
            return
        if self.group and now - self.heard_at > self.cluster.settings.lease_seconds:
            self.group, self.soft = None, None
        if self.is_cut:
            return
        if self.peer is not None and self.peer not in self.cluster.peers:
            self.peer, self.retry_at = None, now
        if self.peer is None:
            if now >= self.retry_at:
                self.connect()
            return
        while self.outbox:
            self.send(self.outbox.popleft())
        self.read()
        self.watch_group()
        self.send(Ping())
        if self.peer is not None and self.peer in self.cluster.peers:
            self.heard_at = now

    def read(self) -> None:
        """Handle the received messages."""
        while self.inbox and self.is_alive and self.has_answered:
            message = self.inbox.popleft()
            self.heard_at = self.cluster.now
            self.received.append(message)
            match message:
                case Welcome(generation=generation):
                    self.known = max(self.known, generation)
                    if self.is_leaving:
                        self.send(Leaving())
                case Plan(generation=generation) if generation > (
                    self.group.generation if self.group else 0
                ):
                    self.known = max(self.known, generation)
                    if message.hard or self.group is None:
                        self.get_ready(generation)
                    else:
                        self.soft = message
                case Go():
                    self.cluster.check_go(self, message)
                    self.known = max(self.known, message.generation)
                    self.alone = 0
                    self.group = Placement(
                        message.generation,
                        message.first_rank,
                        message.workers,
                        message.world_size,
                    )
                    self.step = self.cluster.agree_on_step(message.generation)
                    self.send(Up(message.generation, self.step))
                case Leave(generation=generation, save=save):
                    if save:
                        self.cluster.saved.append(self.step)
                    self.send(Left(generation, is_saved=save))
                    self.die(75)
                case End(exit_code=code) | Refused(exit_code=code):
                    self.die(code)

    def watch_group(self) -> None:
        """Leave the group at the boundary that all members agreed on. Report it if it lost a member."""
        group = self.group
        if group is None:
            return
        members = self.cluster.members_of(group.generation)
        if sum(one.group.workers for one in members if one.group) < group.world_size:
            self.alone += 1
            if self.alone == 3:
                self.send(Broken(group.generation, "peer_lost"))
            return
        self.alone = 0
        if self.soft and all(one.soft and one.can_run for one in members):
            generation = self.soft.generation
            for one in members:
                one.get_ready(one.soft.generation if one.soft else generation)


class Cluster:
    """A cluster of fake nodes with one coordinator at a time."""

    def __init__(
        self, settings: GroupSettings | None = None, *, generation: int = 0
    ) -> None:
        self.settings = settings or make_settings()
        self.now = 1000.0
        self.nodes: list[FakeNode] = []
        self.peers: dict[int, FakeNode] = {}
        self.num_peers = 0
        self.num_nodes = 0
        self.durable = generation
        self.planned = generation
        self.gone = 0
        self.group = new_group(self.settings, generation=generation, now=self.now)
        self.go_members: dict[int, list[tuple[FakeNode, Go]]] = {}
        self.trained = -1
        self.is_graceful = False
        """Whether nothing fails in this test. If so, no step may be lost or trained twice."""
        self.saved: list[int] = []
        self.saves_asked: list[str] = []
        self.exit_code: int | None = None
        self.logs: list[Log] = []
        self._queue: deque[Any] = deque()
        self._is_busy = False

    # ---- actions of the cluster ----------------------------------------------------------------------------

    def start(
        self, name: int | str, *, workers: int = 1, step: int = -1, script: str = ""
    ) -> FakeNode:
        """Start a new process of a node, and connect it."""
        self.num_nodes += 1
        node = FakeNode(
            self,
            str(name),
            f"i{self.num_nodes}",
            workers=workers,
            step=step,
            heard_at=self.now,
        )
        node.fingerprint = {"script": script} if script else {}
        self.nodes.append(node)
        node.connect()
        return node

    def newest(self, name: int | str) -> FakeNode | None:
        """Return the newest living process of a node, or None if there is none."""
        return next(
            (one for one in reversed(self.nodes) if one.name == str(name) and one.is_alive),
            None,
        )

    def restart_coordinator(
        self, *, durable: int | None = None, epoch: int | None = None
    ) -> None:
        """Replace the coordinator. It restores only the durable generation, or 0 if ``epoch`` is given."""
        if epoch is not None:
            self.settings, durable = dataclasses.replace(self.settings, epoch=epoch), 0
        self.peers.clear()
        for node in self.nodes:
            node.peer, node.retry_at = None, self.now + 0.15
        self.durable = self.durable if durable is None else durable
        self.group = new_group(self.settings, generation=self.durable, now=self.now)

    def run(self, seconds: float) -> None:
        """Advance the time by ``seconds``. In each tick, every living node acts and reads."""
        for _ in range(max(1, round(seconds / TICK))):
            self.now += TICK
            for node in [one for one in self.nodes if one.is_alive]:
                node.act()
            self.train()
            self.carry_out(events.on_tick(self.group, now=self.now))
            for node in [one for one in self.nodes if one.is_alive]:
                if not (node.is_frozen or node.is_cut) and node.peer in self.peers:
                    node.read()

    def run_until_running(self, *, within: float = 30.0) -> None:
        """Run until all members of the newest group are up, for at most ``within`` simulated seconds."""
        until = self.now + within
        while self.condition.phase != "Running":
            assert self.now < until, self.condition
            self.run(TICK)

    def train(self) -> None:
        """Finish a step in each complete group, and check that only the newest group trains."""
        for generation in {node.group.generation for node in self.nodes if node.group}:
            members = self.members_of(generation)
            size = sum(one.group.workers for one in members if one.group)
            if (
                all(one.can_run for one in members)
                and members[0].group
                and size == members[0].group.world_size
            ):
                assert generation == self.gone, (
                    f"generation {generation} trains although {self.gone} has begun"
                )
                step = max(one.step for one in members) + 1
                assert not self.is_graceful or step == self.trained + 1, (
                    "a step was lost or trained twice"
                )
                self.trained = step
                for one in members:
                    one.step = step

    def members_of(self, generation: int) -> list[FakeNode]:
        """Return the nodes whose workers are in the group ``generation``."""
        return [
            node
            for node in self.nodes
            if node.group and node.group.generation == generation
        ]

    def agree_on_step(self, generation: int) -> int:
        """Return the step from which a new group resumes.

        It is the newest step in its members' memory, or else the newest saved step.
        """
        held = max(node.step for node, _ in self.go_members[generation])
        return held if held >= 0 else max(self.saved, default=-1)

    def newest_step(self) -> int:
        """Return the highest step in the memory of a living node, or -1."""
        return max((node.step for node in self.nodes if node.is_alive), default=-1)

    @property
    def condition(self) -> GroupCondition:
        """The phase, reason and message of the group."""
        return describe_condition(self.group, now=self.now)

    # ---- actions of the coordinator ------------------------------------------------------------------------

    def carry_out(self, effects: list[Any]) -> None:
        """Carry out effects in order, as the edge does. Effects that arise meanwhile are queued."""
        self._queue.extend(effects)
        if self._is_busy:
            return
        self._is_busy = True
        while self._queue:
            self._carry_out(self._queue.popleft())
        self._is_busy = False

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case Persist(expected, generation):
                assert expected == self.durable and generation > max(
                    self.durable, self.planned
                )
                self.durable = self.planned = generation
            case Send(peer, message):
                self._send(peer, message)
            case Close(peer, _):
                node = self.peers.pop(peer, None)
                if (
                    node is not None
                    and node.peer == peer
                    and not node.is_cut
                    and node.is_alive
                ):
                    node.read()
                    if node.peer == peer:
                        node.peer, node.retry_at = None, self.now + 0.15
                events.on_lost(self.group, peer, "closed", now=self.now)
            case Finish(code):
                self.exit_code = code
            case Log():
                self.logs.append(effect)

    def _send(self, peer: int, message: Message) -> None:
        if isinstance(message, Plan | Go | Welcome | Leave):
            assert message.generation <= max(self.durable, self.planned), (
                "a number was heard before it was durable"
            )
        node = self.peers.get(peer)
        if isinstance(message, Go):
            self._note_go(message, node)
        if isinstance(message, Leave) and message.save and node:
            assert node.step == max(
                one.step for one in self.nodes if one.is_alive and one.is_leaving
            )
            self.saves_asked.append(node.name)
        if node is not None and node.peer == peer:
            node.inbox.append(message)

    def _note_go(self, go: Go, node: FakeNode | None) -> None:
        assert node is not None, "go to a connection that is gone"
        assert go.generation >= self.gone
        if go.generation > self.gone:
            self._check_last_group()
        self.gone = go.generation
        group = self.go_members.setdefault(go.generation, [])
        assert go.node_rank == len(group), "two groups of one generation"
        assert go.first_rank == sum(one.workers for _, one in group)
        assert not node.is_leaving or not any(
            isinstance(one, Leaving) for one in node.received
        ), "go to a node that leaves"
        group.append((node, go))
        # Use the current limits: they can change while the coordinator runs.
        least, most = self.group.settings.min_nodes, self.group.settings.max_nodes
        assert (
            least <= go.num_nodes or self.settings.recovery == "fresh"
        ) and go.num_nodes <= most
        assert node.ready_for == go.generation, "go before ready"
        joined = self.group.nodes.get(node.name)
        assert joined is not None and not joined.is_leaving and not joined.is_done

    def _check_last_group(self) -> None:
        group = self.go_members.get(self.gone, [])
        assert (
            not group or group[-1][1].num_nodes == len(group) == group[-1][1].node_rank + 1
        )

    def check_go(self, node: FakeNode, go: Go) -> None:
        """Check a Go message from the node's side."""
        group = self.go_members[go.generation]
        assert len(group) == go.num_nodes
        assert sum(one.workers for _, one in group) == go.world_size
        assert node.group is None, "go to a node whose workers are in a group"


__all__ = [
    "TOKEN",
    "Boundary",
    "Capacity",
    "Cluster",
    "Done",
    "FakeNode",
    "Progress",
    "Result",
    "make_settings",
]

"""Serves the coordinator's connections: passes messages and time to the rules and carries out their effects.

If a peer breaks the protocol, only its own connection is closed.
"""

import asyncio
import contextlib
import functools
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from evergrad_common.addresses import open_listener
from evergrad_common.codec import ProtocolError, UnknownTypeError, encode
from evergrad_common.secret import is_token
from evergrad_coordinator.edge.bounded_log import BoundedLog, LogLine
from evergrad_coordinator.edge.effects import EffectQueue
from evergrad_coordinator.edge.journal import GenerationStore
from evergrad_coordinator.edge.peer import ConnectionLimits, Peer
from evergrad_coordinator.protocol import Beat, Hello, Message, Ping, Pong, decode_from_node
from evergrad_coordinator.rules import events
from evergrad_coordinator.rules.budget import MAX_FAILURES
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.state import Close, Effect, Finish, Log, Persist, Send

_BACKLOG = 4096
"""Connections that wait to be accepted: all nodes of a large run connect together."""
STALL_SECONDS = 30.0
"""Seconds without a completed tick after which this process is restarted: a hundred times the pause between
two ticks, and far above the few seconds for which a busy machine may delay a tick. Until then no silent node
is detected."""
_JOURNAL_SECONDS = 10.0
"""If one write of the journal (one sector) takes longer, in seconds, the coordinator reports an obstacle."""
_PING = Ping()
_PING_LINE = encode(_PING).rstrip()
"""Nearly all messages of a run are this line, which needs no decoder."""
_encode_once = functools.lru_cache(maxsize=8)(encode)
"""Keeps the newest lines: a plan is the same one for a thousand nodes."""


@dataclass
class Counters:
    """Counts of the edge, for /metrics."""

    connections: int = 0
    messages: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    internal_errors: int = 0


class Server:
    """Passes messages and time to the rules, and carries out the effects that they return, in order."""

    def __init__(
        self,
        group: Group,
        store: GenerationStore,
        *,
        log: LogLine,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.group = group
        self.limits = limits or ConnectionLimits()
        self.counters = Counters()
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._log = BoundedLog(log, lines_per_second=self.limits.log_lines_per_second)
        self.effects = EffectQueue(
            store,
            self._carry_out,
            log=self._log,
            most=self.limits.waiting_effects,
            retry_seconds=self.limits.persist_retry_seconds,
        )
        self._peers: dict[int, Peer] = {}
        self._unknown: dict[int, Peer] = {}
        self._unheard: dict[int, Peer] = {}
        """Nodes that have sent a message while too many effects waited for the journal."""
        self._pong = encode(Pong(group.generation))
        self._ticked_at = time.monotonic()
        """When a tick was last completed."""
        self._timer: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None

    def find_stall(self) -> str:
        """Return why this process must be replaced, in words; empty if it works."""
        if self.effects.is_superseded:
            return "superseded: another coordinator has taken the next generation"
        if self.effects.has_stopped:
            return "the journal's task has ended: no change of the group is carried out"
        seconds = time.monotonic() - self._ticked_at
        if seconds > STALL_SECONDS:
            return f"no tick was completed for {seconds:.0f} s: lost nodes are not detected"
        return ""

    def find_obstacle(self) -> str:
        """Return why the group cannot be changed now, in words; empty if it can."""
        if stall := self.find_stall():
            return stall
        if not self.effects.is_writable:
            return "the newest generation cannot be stored"
        if (seconds := self.effects.seconds_waiting) > _JOURNAL_SECONDS:
            return (
                f"the newest generation has been waiting for the disk for {seconds:.0f} s"
            )
        return ""

    @property
    def num_connections(self) -> int:
        """Number of open connections, also before their hello, without connections that only send beats."""
        return sum(peer.beats_for is None for peer in self._peers.values())

    async def listen(self, host: str, port: int) -> int:
        """Start to serve, and return the port. Raises OSError if the address cannot be bound."""
        allow_many_files()
        loop = asyncio.get_running_loop()

        # A defect that a peer's line triggers must not end the other connections or the group.
        def report_error(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
            self.counters.internal_errors += 1
            what, error = str(context.get("message")), context.get("exception")
            self._log.say("internal_error", message=what, error=repr(error))

        loop.set_exception_handler(report_error)
        listener = open_listener(host, port, backlog=_BACKLOG)
        self._listener = await loop.create_server(
            lambda: Peer(self, self.limits), sock=listener, backlog=_BACKLOG
        )
        self._tick()
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._timer:
            self._timer.cancel()
        self.effects.cancel()
        if self._listener:
            self._listener.close()
        # Each connection gets a second to send its last messages, for example the end of the run.
        for peer in list(self._peers.values()):
            peer.close(patience=1.0)
        await asyncio.sleep(0)

    def set_bounds(
        self, min_nodes: int, max_nodes: int, max_failures: int | None = None
    ) -> str:
        """Set new bounds, which the owner of the run has requested.

        Returns a message with the problem and its remedy, or an empty text if the bounds are valid.
        """
        most = self.group.settings.max_members
        if not 1 <= min_nodes <= max_nodes <= most:
            return (
                f"bounds: min {min_nodes} and max {max_nodes} are not 1 <= min <= max <= {most}. "
                "Correct them."
            )
        if max_failures is not None and not 0 <= max_failures <= MAX_FAILURES:
            return f"bounds: maxFailures {max_failures} is not within 0 and {MAX_FAILURES}. Correct it."

        if self.effects.is_full:
            return (
                "bounds: the newest generation cannot be stored, and too much waits for that. Look at "
                "the coordinator's log, and try again."
            )
        bounds = events.set_bounds(
            self.group,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            max_failures=max_failures,
            now=time.monotonic(),
        )
        self._apply(bounds)
        return ""

    # ---- called by peers -----------------------------------------------------------------------------------

    def add(self, peer: Peer) -> None:
        """Record a new connection."""
        self.counters.connections += 1
        peer.number = self.counters.connections
        self._peers[peer.number] = self._unknown[peer.number] = peer
        # Close the oldest: a node sends hello immediately, and silent strangers must not keep nodes out.
        if len(self._unknown) > self.limits.unknown_peers:
            self.reject(next(iter(self._unknown.values())), "too_many_connections")

    def forget(self, peer: Peer, why: str) -> None:
        """Record that a connection has ended."""
        if self._peers.pop(peer.number, None) is None:
            return
        self._unknown.pop(peer.number, None)
        self._unheard.pop(peer.number, None)
        if peer.has_joined:
            self._apply(events.on_lost(self.group, peer.number, why, now=time.monotonic()))

    def take_line(self, peer: Peer, line: bytes) -> None:
        """Handle one line of a peer."""
        now, limits = time.monotonic(), self.limits
        if not peer.is_within_rate(
            now, burst=limits.messages, rate=limits.messages_per_second
        ):
            self.reject(peer, "too_many_messages")
            return
        try:
            message = _PING if line == _PING_LINE else decode_from_node(line)
        except ProtocolError as error:
            # A newer node may send messages that this version does not have. It would send them on each
            # connection, so closing the connection would keep it from training at all.
            is_known = peer.has_joined or peer.beats_for is not None
            if not (isinstance(error, UnknownTypeError) and is_known):
                self.reject(peer, "malformed", str(error))
            return
        self.counters.messages += 1

        # The first message decides whether this is a node's own connection or only sends its beats.
        if isinstance(message, Beat) or peer.beats_for is not None:
            self._take_beat(peer, message, now)
        elif isinstance(message, Hello) == peer.has_joined:
            what = "sent twice" if peer.has_joined else "before hello"
            self.reject(peer, "malformed", f"{message.TYPE}: {what}")
        elif not isinstance(message, Ping) and (
            self.effects.is_full or peer.number in self._unheard
        ):
            # Too many effects wait for the journal. No node can join. Connected nodes continue to train,
            # because pings still renew their leases. Their other messages are dropped. These nodes must send
            # all their messages again, in order, so nothing more is accepted from them until they reconnect,
            # even if the journal works again.
            if isinstance(message, Hello):
                self.reject(peer, "journal_waits")
            else:
                self._unheard[peer.number] = peer
        elif isinstance(message, Hello):
            peer.has_joined = True
            self._unknown.pop(peer.number, None)
            self._apply(events.on_hello(self.group, peer.number, message, now=now))
        else:
            # Answer a ping immediately: the answer renews a lease and must not wait for the journal.
            effects = events.on_message(self.group, peer.number, message, now=now)
            if isinstance(message, Ping):
                self._answer_ping(peer)
            else:
                self._apply(effects)

    def _take_beat(self, peer: Peer, message: Message, now: float) -> None:
        """Record that a node is alive: its helper process sends one ``beat`` and then pings."""
        settings = self.group.settings
        if isinstance(message, Beat) and peer.beats_for is None and not peer.has_joined:
            if not is_token(message.token, settings.token) or message.run != settings.run:
                self.reject(peer, "wrong_token")
                return
            self._unknown.pop(peer.number, None)
            peer.beats_for = (message.node, message.incarnation)
        elif not isinstance(message, Ping):
            self.reject(
                peer,
                "malformed",
                f"{message.TYPE}: sent on a connection for heartbeats, or after another first message",
            )
            return
        if peer.beats_for is not None:
            events.on_beat(self.group, peer.beats_for, now=now)
            self._answer_ping(peer)

    def _answer_ping(self, peer: Peer) -> None:
        # If another coordinator has taken over, do not renew leases: the nodes of this group would continue
        # to train while the other coordinator runs its own group.
        if not self.effects.is_superseded:
            self._write(peer, self._pong)

    def reject(self, peer: Peer, reason: str, detail: str = "") -> None:
        """End a connection that breaks the rules."""
        self.counters.rejected[reason] = self.counters.rejected.get(reason, 0) + 1
        self._log.say("rejected", peer=peer.host, reason=reason, detail=detail[:200])
        peer.close(patience=0)
        self.forget(peer, reason)

    # ---- effects -------------------------------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect]) -> None:
        self.effects.add(effects)
        # An event may have requested a review that is due before the next tick.
        at = events.next_tick(self.group, now=time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(number, message):
                if (peer := self._peers.get(number)) is not None:
                    self._write(peer, _encode_once(message))
            case Close(number, why):
                if (peer := self._peers.get(number)) is not None:
                    self._log.say("closed", peer=peer.host, why=why)
                    peer.close(patience=self.limits.closing_seconds)
            case Log(event, fields):
                say = self._log.say_always if event in _RARE else self._log.say
                say(event, **fields)
            case Finish(exit_code):
                if not self.finished.done():
                    self.finished.set_result(exit_code)
            case Persist(_, generation):
                # A pong may name the generation only now that it is durable.
                self._pong = encode(Pong(generation))

    def _write(self, peer: Peer, data: bytes) -> None:
        if not peer.write(data, limit=self.limits.unsent_bytes):
            self.reject(peer, "does_not_read")

    def _tick(self) -> None:
        self._timer = None
        # Schedule the next tick even if this one fails: without ticks no lost node would be detected.
        try:
            self._take_time(time.monotonic())
            self._ticked_at = time.monotonic()
        finally:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(
                    events.TICK_SECONDS, self._tick
                )

    def _take_time(self, now: float) -> None:
        # Silent strangers hold places that nodes need.
        for peer in list(self._unknown.values()):
            if now - peer.connected_at > self.limits.hello_seconds:
                self.reject(peer, "no_hello")

        # While too many effects wait for the journal, decide nothing, as if this process were paused.
        if self.effects.is_full:
            return
        # A node sends all its messages again on a new connection.
        for peer in list(self._unheard.values()):
            self.reject(peer, "journal_waits")
        for peer in find_silent_beats(self._peers.values(), self.group, now):
            self._carry_out(Close(peer.number, "silent"))
        self._apply(events.on_tick(self.group, now=now))


_RARE = frozenset({"plan", "go", "up", "adopted", "bounds", "finished", "waiting", "empty"})
"""Events that are always logged: each follows from a decision, and a peer cannot cause them at will."""


def find_silent_beats(peers: Iterable[Peer], group: Group, now: float) -> list[Peer]:
    """Return the connections for beats on which nothing has arrived for the length of a lease.

    A host that vanishes does not close its connections. Without this, each connection would keep its file
    descriptor until this process ends.
    """
    if now - group.ticked_at > events.STANDSTILL_SECONDS:
        return []
    limit = max(group.lease_end, group.settings.silence_seconds)
    return [
        peer
        for peer in peers
        if peer.beats_for is not None
        and not peer.is_closing
        and now - peer.heard_at > limit
    ]


def allow_many_files() -> None:
    """Raise the limit of open files as far as the system allows: usual soft limits of 1024 are too few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""The node's side of its connection to the coordinator. Messages that may have been lost are sent again."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Protocol

from evergrad_common.codec import ProtocolError
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.protocol import (
    Broken,
    Capacity,
    Done,
    Go,
    Hello,
    Leaving,
    Message,
    Placement,
    Plan,
    Refused,
    Restoring,
    Result,
    Up,
    Welcome,
)
from evergrad_trainer.node.settings import NodeSettings

_log = logging.getLogger(__name__)
_REFUSED_SECONDS = (1.0, 2.0, 4.0)
"""Pauses before a refused node tries again; after the last attempt, its place is free for another host."""


class Member(Protocol):
    """The node's workers, as a hello message describes them."""

    @property
    def capacity(self) -> int: ...
    @property
    def place(self) -> Go | None: ...


class Conversation:
    """Keeps one connection at a time to the same address, on one event loop.

    Nothing here waits for a reply, except ``commit``.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        member: Callable[[], Member],
        on_message: Callable[[Message], None],
        on_connected: Callable[[], None],
    ) -> None:
        """``on_connected`` is called on each new connection, after the node's state has been sent again."""
        self._settings = settings
        self._member = member
        self._on_message = on_message
        self._on_connected = on_connected
        self.incarnation = uuid.uuid4().hex
        self.known_generation = 0
        self.lease_seconds = 10.0
        self.num_refusals = 0
        """Refusals since the last welcome."""
        self.is_leaving = False
        self._takes_restoring = False
        """Whether the coordinator that sent the newest welcome accepts ``Restoring`` messages."""
        self._client = self._new_client()
        self._last: dict[type[Message], Message] = {}
        """The last ``up``, ``broken``, ``done`` and ``result`` messages that were sent."""
        self._said: Placement | None = None
        """The placement in the newest hello."""

    async def converse(self, *, is_over: Callable[[], bool]) -> bool:
        """Communicate until the run is over. Returns False if the node was refused.

        A refusal may be temporary, so the node retries three times.
        """
        await self._client.run()
        # For example, another node leaves its place, or the token is mounted late.
        while not is_over() and 0 < self.num_refusals <= len(_REFUSED_SECONDS):
            await asyncio.sleep(_REFUSED_SECONDS[self.num_refusals - 1])
            self._client = self._new_client()
            await self._client.run()
        return not self.num_refusals

    def close(self) -> None:
        self._client.close()

    @property
    def seconds_since_contact(self) -> float:
        return self._client.seconds_since_contact

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    async def commit(self, generation: int) -> bool:
        """Ask the coordinator whether ``generation`` may still write, and return its answer."""
        return await self._client.commit(generation)

    def send(self, message: Message) -> bool:
        """Send a message. Returns False if it could not be sent and should be sent again.

        Returns True for a message that cannot be encoded, because sending it again would fail again.
        """
        if isinstance(message, Restoring) and not self._takes_restoring:
            # An older coordinator would close the connection at each of these messages.
            return False
        self.remember(message)
        try:
            return self._client.send(message)
        except ProtocolError as error:
            _log.warning(
                "node %s could not say %r: %s", self._settings.node, message.TYPE, error
            )
            return True

    def remember(self, message: Message) -> None:
        """Keep a message of a kind that must not be lost, to send it again on the next connection."""
        if isinstance(message, Up | Broken | Done | Result):
            self._last[type(message)] = message

    def has_said(self, kind: type[Message]) -> bool:
        """Return whether a message of this kind would be sent again."""
        return kind in self._last

    def _new_client(self) -> CoordinatorClient:
        return CoordinatorClient(
            self._settings.coordinator_host,
            self._settings.coordinator_port,
            hello=self._hello,
            on_message=self._take,
            on_connected=self._greet,
        )

    def _hello(self) -> Hello:
        member, settings = self._member(), self._settings
        place = member.place
        self._said = had = (
            None
            if place is None
            else Placement(
                place.generation, place.first_rank, place.workers, place.world_size
            )
        )
        return Hello(
            run=settings.run,
            node=settings.node,
            incarnation=self.incarnation,
            address=settings.address,
            workers=member.capacity,
            recovery=settings.recovery,
            fingerprint=settings.fingerprint,
            token=settings.token,
            had=had,
            known_generation=self.known_generation,
        )

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                self.num_refusals = 0
                self._takes_restoring = message.takes_restoring
                self.lease_seconds = message.lease_seconds
                self.known_generation = max(self.known_generation, message.generation)
            case Plan():
                self.known_generation = max(self.known_generation, message.generation)
                # Workers that had ended successfully may be started again in the planned group.
                self._last.pop(Done, None)
            case Refused():
                self.num_refusals += 1
        self._on_message(message)

    def _greet(self) -> None:
        """Send, after the hello of each connection, what the coordinator may not have received or may have
        lost."""
        member, said = self._member(), self._said

        # A worker may have become warm between hello and welcome.
        self.send(Capacity(member.capacity))
        place = member.place
        if said is not None and (place is None or place.generation != said.generation):
            # A hello may wait a long time for a coordinator that hangs. Meanwhile the node may have left the
            # group that the hello named.
            broken = self._last.get(Broken)
            if not isinstance(broken, Broken) or broken.generation != said.generation:
                message = "the node left its group while the coordinator was away"
                broken = Broken(said.generation, "peer_lost", message=message)
            self.send(broken)

        # This node's group may have been up since before the coordinator was lost.
        up = self._last.get(Up)
        if isinstance(up, Up) and place is not None and place.generation == up.generation:
            self.send(up)

        # Send progress before the messages that may end the run, because the coordinator ignores it
        # afterwards.
        self._on_connected()
        for kind in (Result, Done):
            if kind in self._last:
                self.send(self._last[kind])
        if self.is_leaving:
            self.send(Leaving())

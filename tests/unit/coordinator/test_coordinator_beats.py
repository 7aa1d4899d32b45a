"""Heartbeat connections of processes next to the nodes: when the coordinator closes or refuses one."""

import socket
from collections.abc import Iterator
from typing import cast

import pytest
from simulated_cluster import make_settings

from evergrad_coordinator.edge import heartbeat_sender
from evergrad_coordinator.edge.peer import ConnectionLimits, Peer, PeerOwner
from evergrad_coordinator.edge.server import find_silent_beats
from evergrad_coordinator.rules.events import STANDSTILL_SECONDS
from evergrad_coordinator.rules.group import new_group

LEASE = 10.0
NOW = 1000.0


def make_peer(heard_at: float, *, beats: bool = True) -> Peer:
    peer = Peer(cast(PeerOwner, None), ConnectionLimits())
    peer.heard_at = heard_at
    peer.beats_for = ("0", "i0") if beats else None
    return peer


def test_only_a_heartbeat_connection_that_is_silent_for_longer_than_a_lease_is_closed() -> (
    None
):
    group = new_group(make_settings(lease_seconds=LEASE), generation=0, now=NOW)
    silent, recent = make_peer(NOW - LEASE - 1.5), make_peer(NOW - LEASE)
    # The rules close the connections of nodes, and other connections that send nothing.
    own = make_peer(NOW - 10 * LEASE, beats=False)
    assert find_silent_beats([silent, recent, own], group, NOW) == [silent]
    # It is closed already; the rest of it is still in transit.
    silent.close(patience=0)
    assert find_silent_beats([silent], group, NOW) == []


def test_a_suspended_coordinator_reads_received_data_before_it_judges_heartbeats() -> None:
    group = new_group(make_settings(lease_seconds=LEASE), generation=0, now=NOW)
    later = NOW + max(2 * LEASE, 2 * STANDSTILL_SECONDS)
    assert find_silent_beats([make_peer(NOW)], group, later) == []
    group.ticked_at = later
    assert len(find_silent_beats([make_peer(NOW)], group, later)) == 1


class ConnectedError(Exception):
    """Return whether the process has requested a connection."""


def test_the_heartbeat_process_of_a_frozen_node_connects_only_after_the_node_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: Iterator[bool] = iter([True, True, False])
    pauses: list[float] = []

    def connect(*_: object, **__: object) -> None:
        raise ConnectedError

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    order = {"host": "127.0.0.1", "port": 1, "beat": {"type": "beat"}}
    monkeypatch.setattr(heartbeat_sender, "read_order", lambda: order)
    monkeypatch.setattr(heartbeat_sender, "is_stopped", lambda _: next(frozen))
    monkeypatch.setattr(heartbeat_sender, "wait_for_end", pause)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ConnectedError):
        heartbeat_sender.main()
    assert len(pauses) == 2 and next(frozen, None) is None

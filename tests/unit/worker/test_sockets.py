"""Only connected TCP sockets are found, and only the given ones are cut."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from evergrad_trainer.worker.sockets import connected_sockets, cut_sockets

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@contextlib.contextmanager
def connect(listener: socket.socket) -> Iterator[Pair]:
    with (
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        yield ours, theirs


def inode_of(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def is_cut(one: socket.socket) -> bool:
    one.settimeout(1)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False


def test_only_connections_are_found(listener: socket.socket) -> None:
    first, second = socket.socketpair()
    with (
        first,
        second,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket() as fresh,
    ):
        datagrams.connect(listener.getsockname())
        before = connected_sockets()
        for other in (first, second, datagrams, fresh, listener):
            assert inode_of(other) not in before
        with connect(listener) as pair:
            assert connected_sockets() - before == {inode_of(one) for one in pair}


def test_a_cut_frees_both_ends_and_keeps_other_connections_and_listeners(
    listener: socket.socket,
) -> None:
    with connect(listener) as old:
        outside = connected_sockets()
        with connect(listener) as new:
            assert cut_sockets(connected_sockets() - outside) == 2
            assert is_cut(new[0]) and is_cut(new[1])
        assert not is_cut(old[0])
        old[1].sendall(b"x")
        assert old[0].recv(1) == b"x"
        with connect(listener) as later:
            later[0].sendall(b"y")
            assert later[1].recv(1) == b"y"


def test_a_connection_that_reuses_the_number_of_a_closed_one_is_not_cut(
    listener: socket.socket,
) -> None:
    # Tests before this one in the process may have left connections open.
    outside = connected_sockets()
    with connect(listener) as first:
        named, numbers = connected_sockets() - outside, {one.fileno() for one in first}
    with connect(listener) as second:
        assert {one.fileno() for one in second} == numbers
        assert cut_sockets(named) == 0
        second[0].sendall(b"x")
        assert second[1].recv(1) == b"x"


def test_a_second_or_empty_cut_is_not_an_error(listener: socket.socket) -> None:
    assert cut_sockets(frozenset()) == 0
    outside = connected_sockets()
    with connect(listener):
        named = connected_sockets() - outside
        cut_sockets(named)
        cut_sockets(named)


def test_a_search_for_connections_leaves_no_descriptor(listener: socket.socket) -> None:
    with connect(listener):
        with socket.socket() as probe:
            lowest = probe.fileno()
        for _ in range(20):
            connected_sockets()
        with socket.socket() as probe:
            assert probe.fileno() == lowest

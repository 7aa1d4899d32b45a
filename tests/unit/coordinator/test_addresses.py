"""Addresses with ports: read, written, and listened on, in both families."""

import socket
import urllib.request

import pytest
from patience import PATIENCE
from prometheus_client import CollectorRegistry, Gauge

from evergrad_common.addresses import (
    ANY,
    join_address,
    open_listener,
    plain_host,
    split_address,
)
from evergrad_trainer.observers.metrics_server import MetricsServer


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(
    not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address"
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run-0.team.svc:29400", ("run-0.team.svc", 29400)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:29400", ("::1", 29400)),
        (" [fd00:10::5]:65535 ", ("fd00:10::5", 65535)),
    ],
)
def test_an_address_is_split_and_formatted_unchanged(
    text: str, parts: tuple[str, int]
) -> None:
    assert split_address(text) == parts
    assert join_address(*parts) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:1x",
        "::1:29400",
        "[::1]",
        "[host]:1",
    ],
)
def test_an_address_without_a_valid_port_is_refused(text: str) -> None:
    assert split_address(text) is None


def test_an_ipv4_mapped_address_is_shown_as_ipv4() -> None:
    assert plain_host("::ffff:10.0.0.7") == "10.0.0.7"
    assert plain_host("fd00::5") == "fd00::5"
    assert plain_host("10.0.0.7") == "10.0.0.7"
    assert plain_host("") == ""


@needs_ipv6
def test_a_listener_on_any_address_accepts_both_families_on_one_port() -> None:
    with open_listener(ANY, 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=PATIENCE):
                accepted, place = listener.accept()
                accepted.close()
                assert plain_host(place[0]) == host


@needs_ipv6
def test_a_listener_on_one_address_accepts_only_that_address() -> None:
    with open_listener("::1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("::1", port), timeout=PATIENCE).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_a_port_in_use_is_an_error_and_changes_no_family() -> None:
    with (
        open_listener(ANY, 0) as listener,
        pytest.raises(OSError, match="in use"),
    ):
        open_listener(ANY, listener.getsockname()[1])


def test_a_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def refuse(place: tuple[str, int], **rest: object) -> socket.socket:
        if rest.get("dualstack_ipv6"):
            raise OSError(97, "Address family not supported by protocol")
        return create(place, backlog=1)

    monkeypatch.setattr(socket, "create_server", refuse)
    with open_listener(ANY, 0) as listener:
        assert listener.family == socket.AF_INET


@needs_ipv6
def test_metrics_can_be_scraped_over_both_families() -> None:
    registry = CollectorRegistry()
    Gauge("one", "A number.", registry=registry).set(7)
    server = MetricsServer(registry, port=0, host=ANY)
    try:
        for host in ("127.0.0.1", "[::1]"):
            with urllib.request.urlopen(
                f"http://{host}:{server.port}/metrics", timeout=PATIENCE
            ) as answer:
                assert b"one 7.0" in answer.read()
    finally:
        server.close()

"""A name server that never responds: torch looks up the name of every peer of a store, which must not delay
the start of a group."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster, fault

MakeCluster = Callable[..., Cluster]
SILENT = "127.0.0.53"
UNKNOWN = "127.0.0.77"
"""An address of this machine that is in no local file, so that only the name server could resolve it."""


@pytest.fixture
def dead_resolver(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A resolv.conf that names a server which takes questions and never answers, and that server."""
    if os.geteuid() != 0:
        pytest.skip("another resolv.conf needs root")
    configuration = tmp_path / "resolv.conf"
    configuration.write_text(f"nameserver {SILENT}\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SILENT, 53))
        server.setblocking(False)
        yield configuration, server


def test_groups_form_although_no_name_can_be_resolved(
    make_elastic: MakeCluster, undisturbed: Any, dead_resolver: tuple[Path, socket.socket]
) -> None:
    """Every group forms at its first attempt: no generation is lost because of a slow set-up."""
    configuration, server = dead_resolver
    death = fault("SIGKILL", "slot", node=2, step=4, to="node")
    cluster = make_elastic().start(faults=[death], resolver=configuration, address=UNKNOWN)
    cluster.finish(nodes=[0, 1])
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.log("go")) == 2, "one group of three, one of two"
    assert server.recv(1024), "no name was asked for: this test shows nothing"

"""Clusters with only IPv6, and with both families and IPv6 first: runs train through a kill to their end, the
webhook answers, and metrics and pages are served.

Each test uses its own bed, next to the bed of the other tests.
"""

import ipaddress
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_cli import Cli, forward_port, open_page
from cluster_runs import ENDLESS, Run, Runs, make_manifest, wait_for
from installed_operator import Operator, install
from operator_watch import OperatorWatch
from patience import PATIENCE
from script_runs import finish, start_script

from bed import places
from bed.api import Api
from bed.fixtures import OTHER_CLUSTER, Cluster, other_cluster, require_bed
from bed.places import REPOSITORY, STORAGE_CLASS
from bed.product_images import TARGETS, name_of
from evergrad_common.addresses import join_address, plain_host
from evergrad_operator.core.objects.names import JOIN_PORT, METRICS_PORT

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]
NUMBER = "5" if places.NUMBER != 5 else "6"
KUBECONFIG = REPOSITORY / f".cluster{NUMBER}" / "kubeconfig"
WEBHOOK_PORT = 9443
SPREAD = {"requests": {"cpu": "1100m"}}
"""More than half of a node, so that each node gets one pod."""
Place = tuple[str, int]


def call(families: str, module: str, *words: str) -> None:
    """Run a command of the bed of these tests."""
    environment = {
        **os.environ,
        "EVERGRAD_BED": NUMBER,
        "EVERGRAD_BED_FAMILIES": families,
        "PYTHONPATH": str(REPOSITORY / "tools"),
        "PYTHONSAFEPATH": "1",
    }
    subprocess.run([sys.executable, "-m", module, *words], env=environment, check=True)


@dataclass(frozen=True)
class OtherBed(Cluster):
    """A bed next to the session's bed, with other address families."""

    families: str

    def product_images(self) -> tuple[str, str]:
        """Both images, loaded into its nodes."""
        call(self.families, "bed.product_images", "--any-revision")
        operator, trainer = (name_of(target) for target in TARGETS)
        return operator, trainer

    def versions(self) -> list[int]:
        """4 and 6, in the order of its address families."""
        return [int(name[-1]) for name in self.families.split(",")]


@pytest.fixture(scope="module", params=["ipv6,ipv4", "ipv6"])
def cluster(request: pytest.FixtureRequest) -> Iterator[OtherBed]:
    if other_cluster() is not None:
        pytest.skip(
            f"The families are those of beds; {OTHER_CLUSTER} names another cluster."
        )
    require_bed()
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("This machine's kernel has no IPv6.")
    families: str = request.param
    # The bed of a killed session may have other address families.
    call(families, "bed", "down")
    try:
        call(families, "bed", "up")
        yield OtherBed(
            KUBECONFIG,
            Api(KUBECONFIG),
            is_bed=True,
            storage_class=STORAGE_CLASS,
            families=families,
        )
    finally:
        call(families, "bed", "down")


@pytest.fixture(scope="module")
def operator(cluster: OtherBed) -> Operator:
    return install(cluster)


@pytest.fixture(scope="module")
def operator_watch(operator: Operator) -> OperatorWatch:
    watch = OperatorWatch(operator)
    watch.look()
    return watch


@pytest.fixture
def cli(runs: Runs, tmp_path: Path) -> Cli:
    return Cli(runs, tmp_path)


def version_of(address: str) -> int:
    return ipaddress.ip_address(address).version


def versions_of(pod: dict[str, Any]) -> list[int]:
    """Return the families of a pod's addresses, the primary one first."""
    addresses = [one["ip"] for one in pod["status"]["podIPs"]]
    assert addresses[0] == pod["status"]["podIP"]
    return [version_of(address) for address in addresses]


def read_place(text: str) -> Place:
    """Return an address and a port as in /proc/net/tcp and /proc/net/tcp6: 32-bit words in the machine's byte
    order."""
    address, _, port = text.partition(":")
    packed = b"".join(
        bytes.fromhex(address[start : start + 8])[::-1]
        for start in range(0, len(address), 8)
    )
    return plain_host(str(ipaddress.ip_address(packed))), int(port, 16)


def read_connections(kubectl: Callable[..., str], pod: str) -> list[tuple[Place, Place]]:
    """Return both ends of every connection of a pod with another, its own end first."""
    text = kubectl("exec", pod, "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
    lines = [line.split() for line in text.splitlines()]
    found = [(read_place(one[1]), read_place(one[2])) for one in lines if one[3] == "01"]
    return [ends for ends in found if not ipaddress.ip_address(ends[1][0]).is_loopback]


def kill(run: Run, index: int) -> None:
    """Delete a pod immediately, as when a node ends."""
    name = run.live_pods()[index]["metadata"]["name"]
    run.runs.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")


def test_read_place_parses_both_address_families() -> None:
    assert read_place("0100007F:1F90") == ("127.0.0.1", 8080)
    assert read_place("0000000000000000FFFF00000B00690A:0050") == ("10.105.0.11", 80)
    assert read_place("050100FD000000000000000001000000:192B") == ("fd00:105::1", 6443)


def test_nodes_train_over_ipv6_and_recover_from_a_killed_pod(
    cluster: OtherBed, runs: Runs, cli: Cli
) -> None:
    run = runs.start("six", steps=ENDLESS, resources=SPREAD)
    pods = run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 2
    coordinator = run.live_pods(role="coordinator")[0]
    for pod in (*pods.values(), coordinator):
        assert versions_of(pod) == cluster.versions()

    # The Service has the cluster's families, and nodes connect to its first address.
    service = runs.get("services", "six-coordinator")
    assert service is not None
    assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    assert [version_of(one) for one in service["spec"]["clusterIPs"]] == cluster.versions()
    addresses = {index: pod["status"]["podIP"] for index, pod in pods.items()}
    for index, pod in pods.items():
        name = pod["metadata"]["name"]
        far = [end for _, end in read_connections(runs.kubectl, name)]
        assert (service["spec"]["clusterIP"], JOIN_PORT) in far
        assert addresses[1 - index] in {host for host, _ in far}
        assert {version_of(host) for host, _ in far} == {6}
        with urllib.request.urlopen(
            f"http://{join_address(addresses[index], METRICS_PORT)}/metrics",
            timeout=PATIENCE,
        ) as answer:
            assert b"\nevergrad_" in answer.read()

    # The page, requested through the API server and a kubelet.
    with open_page(cli, "six") as page:
        assert page.read_updates(1)[0]["status"]["run"] == "six"

    generation = run.rows()[-1]["generation"]
    kill(run, 1)
    run.wait_for_attempt(1, 1)
    wait_for(
        lambda: (
            (row := run.rows()[-1])["generation"] > generation and row["world_size"] == 2
        ),
        "both nodes in a later group",
    )
    run.wait_for_step(run.newest_step() + 20)
    assert run.repeated_steps() == 0


def test_a_script_rejoins_over_ipv6_after_a_killed_pod_and_completes(
    runs: Runs,
) -> None:
    run = start_script(runs, "script")
    kill(run, 1)
    name = run.wait_for_attempt(1, 1)["metadata"]["name"]
    other = run.live_pods()[0]["status"]["podIP"]

    def hosts() -> set[str]:
        return {far[0] for _, far in read_connections(runs.kubectl, name)}

    wait_for(lambda: other in hosts(), "the new pod's connection with the other node")
    assert {version_of(host) for host in hosts()} == {6}
    finish(run)


def test_a_recipe_completes_over_ipv6(runs: Runs) -> None:
    run = runs.start("short", steps=40, nodes={"min": 2, "max": 2})
    run.wait_for_phase("Complete")
    assert {row["world_size"] for row in run.rows()} == {2}


def test_the_webhook_is_called_over_ipv6_and_refuses_with_its_own_message(
    cluster: OtherBed, operator: Operator, runs: Runs, cli: Cli
) -> None:
    pod = operator.pod()
    assert versions_of(pod) == cluster.versions()
    bad = make_manifest(
        "bad", steps=20, changes={"training": {"schedule": {"warmup": "150%"}}}
    )

    def refusal() -> str:
        return runs.kubectl("apply", "-f", "-", text=json.dumps(bad), check=False)

    assert "spec.training.schedule.warmup: " in refusal()
    ends = read_connections(operator.kubectl, pod["metadata"]["name"])
    assert {version_of(far[0]) for near, far in ends if near[1] == WEBHOOK_PORT} == {6}
    assert {version_of(far[0]) for _, far in ends} == {6}
    assert "evergrad_operator_leader" in operator.metrics()
    checks = cli.ask("doctor")["checks"]
    assert [check for check in checks if check["state"] == "fail"] == []
    name = pod["metadata"]["name"]
    with (
        forward_port(cluster, operator.namespace, name, 8081) as address,
        urllib.request.urlopen(address, timeout=PATIENCE) as page,
    ):
        assert page.read().startswith(b"<!doctype html>")

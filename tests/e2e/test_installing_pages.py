"""The pages on installing, monitoring, upgrading and uninstalling: their commands, executed page after page
as by a reader."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import wait_for
from cluster_shell import Shell
from installed_operator import RELEASE, Operator
from pages import read_commands

from bed import prometheus

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.operator_ends,
    pytest.mark.timeout(3600),
]
TEAM = "team-a"
"""The namespace that the page on installing creates."""


@pytest.fixture
def shell(cluster: Any, operator: Operator, tmp_path: Path) -> Iterator[Shell]:
    """A shell on a cluster with the kinds of Prometheus Operator and without Evergrad; the session's operator
    is restored afterwards."""
    if not cluster.is_bed:
        pytest.skip("the page on uninstalling deletes all runs of the cluster.")
    one = Shell(cluster, tmp_path)
    try:
        operator.helm("uninstall", RELEASE, "--wait", "--cascade", "foreground")
        prometheus.install_types(cluster.api)
        yield one
    finally:
        # Remaining monitors are removed by the release's default values, before their kinds are deleted.
        operator.upgrade()
        operator.wait_until_ready()
        prometheus.remove_types(cluster.api)
        one.run(f"kubectl delete namespace {TEAM} --ignore-not-found --wait=false")


def name_registry(command: str) -> str:
    """Return a command with the location of the images under test instead of the reader's registry."""
    assert command.count("registry.example.com/") == 2
    return command.replace("registry.example.com/", "localhost/")


def install_for_one_team(shell: Shell) -> None:
    """The first choice of the page: a namespace, an operator for it, its test, a first run."""
    create, install, test, apply, watch = read_commands("docs/start/installing.md")
    shell.run(create)
    shell.run(name_registry(install))
    assert "Succeeded" in shell.run(test)
    shell.run(apply)
    # It ends with Ctrl-C.
    assert "quickstart" in shell.run(f"timeout 10 {watch}", codes=(124,))
    complete = "kubectl wait --for=condition=Complete trun/quickstart --timeout=10m"
    assert "condition met" in shell.run(f"{complete} --namespace {TEAM}")


def monitor_and_upgrade(shell: Shell, operator: Operator) -> None:
    """One value for monitoring, an upgrade that keeps it, and the rollback."""
    [monitor] = read_commands(
        "docs/operate/monitoring.md", "With Prometheus Operator in the cluster"
    )
    shell.run(monitor)
    operator.wait_for_rollout()
    kinds = "servicemonitors,podmonitors,prometheusrules"
    made = shell.run(f"kubectl get {kinds} -n {operator.namespace} -o name").split()
    assert {name.partition(".")[0] for name in made} == {
        "servicemonitor",
        "podmonitor",
        "prometheusrule",
    }

    upgrade, test = read_commands("docs/operate/upgrading.md", "## Upgrading")
    shell.run(upgrade)
    operator.wait_for_rollout()
    assert "Succeeded" in shell.run(test)
    [rollback] = read_commands("docs/operate/upgrading.md", "## Rolling back")
    shell.run(rollback)
    operator.wait_for_rollout()
    values = shell.run(f"helm get values {RELEASE} -n {operator.namespace}")
    assert re.search(r"metrics:\n +enabled: true", values)


def test_the_pages_for_administrators_are_executed_in_order(
    operator: Operator, shell: Shell
) -> None:
    install_for_one_team(shell)

    # The other choice of the page replaces the first one.
    shell.run(f"helm uninstall {RELEASE} -n {operator.namespace} --wait")
    [install] = read_commands("docs/start/installing.md", "**For the whole cluster**")
    shell.run(name_registry(install))
    operator.wait_for_rollout()
    monitor_and_upgrade(shell, operator)

    # Runs, their definition and the objects that the operator itself has created are deleted last, and
    # volumes stay.
    uninstall, *others = read_commands("docs/start/installing.md", "## Uninstalling")
    shell.run(uninstall)
    wait_for(lambda: not operator.pods(), "the operator's end")
    assert "quickstart" in shell.run(f"kubectl get trun -n {TEAM}")
    deleted = [shell.run(command) for command in others]
    assert "quickstart" in deleted[0] and len(deleted) == 5
    made = "secret/evergrad-key secret/evergrad-webhook lease.coordination.k8s.io/evergrad"
    left = f"kubectl get {made} -n {operator.namespace} --ignore-not-found -o name"
    assert shell.run(left).strip() == ""
    shell.run("kubectl get trun", codes=(1,))
    assert "quickstart" in shell.run(f"kubectl get pvc -n {TEAM}")

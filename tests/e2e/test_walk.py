"""The commands of a new user on a cluster: the README and the quickstart, exactly as written."""

import re
from pathlib import Path

import pytest
from cluster_runs import Runs, wait_for
from cluster_shell import Shell
from pages import read_commands

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def test_the_commands_of_readme_and_quickstart_train_the_run_and_show_it(
    runs: Runs, tmp_path: Path
) -> None:
    shell = Shell(runs.cluster, tmp_path, namespace=runs.namespace)
    runs.adopt("quickstart")
    commands = read_commands("README.md", "## Try it on Kubernetes")
    first = commands.index("kubectl apply -f examples/quickstart/")
    printed = {command: shell.run(command) for command in commands[first:]}
    assert "condition met" in printed[commands[first + 1]]
    assert re.search(r"quickstart +Complete", printed["kubectl get trun"])
    assert "all 200 steps are done" in printed["evergrad status quickstart"]

    # A second apply changes nothing, and a watch, which never ends by itself, shows the current run.
    apply, watch, wait, logs = read_commands("examples/quickstart/README.md")
    assert "trainingrun.evergrad.dev/quickstart unchanged" in shell.run(apply)
    assert re.search(
        r"quickstart +Complete", shell.run(f"timeout 10 {watch}", codes=(124,))
    )
    assert "condition met" in shell.run(wait)
    # The report is written after the last step.
    wait_for(lambda: "report.html" in shell.run(logs), "the last lines of the first node")

"""What a newcomer types on a cluster: the commands of the README and of the quickstart, as they are written
there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_runs import ROOT, Runs, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
SECONDS = 700.0


def read_commands(page: str, heading: str = "") -> list[str]:
    """The commands of the first block behind ``heading``, without their comments."""
    text = (ROOT / page).read_text("utf-8").partition(heading)[2] if heading else ""
    text = text or (ROOT / page).read_text("utf-8")
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block is not None
    lines = block[1].replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


class Shell:
    """Runs commands as a person who has chosen the test's namespace does."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        kubeconfig = folder / "kubeconfig"
        shutil.copy(runs.cluster.kubeconfig, kubeconfig)
        programs = folder / "bin"
        programs.mkdir()
        for name in ("kubectl", "helm"):
            (programs / name).symlink_to(getattr(runs.cluster, name))
        path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PATH": os.pathsep.join(path),
        }
        self.run(f"kubectl config set-context --current --namespace {runs.namespace}")

    def run(self, command: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """What a command prints, from the repository's root."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode in codes, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout


def test_the_commands_of_the_readme_and_of_the_quickstart_train_it_and_show_it(
    runs: Runs, tmp_path: Path
) -> None:
    shell = Shell(runs, tmp_path)
    runs.adopt("quickstart")
    commands = read_commands("README.md", "## On a cluster")
    first = commands.index("kubectl apply -f examples/quickstart/")
    printed = {command: shell.run(command) for command in commands[first:]}
    assert "condition met" in printed[commands[first + 1]]
    assert re.search(r"quickstart +Complete", printed["kubectl get trun"])
    assert "all 200 steps are done" in printed["evergrad status quickstart"]

    # Applied again nothing changes, and a watch, which never ends by itself, shows the run as it is.
    apply, watch, wait, logs = read_commands("examples/quickstart/README.md")
    assert "trainingrun.evergrad.dev/quickstart unchanged" in shell.run(apply)
    assert re.search(r"quickstart +Complete", shell.run(f"timeout 10 {watch}", codes=(124,)))
    assert "condition met" in shell.run(wait)
    # The report is written behind the last step.
    wait_for(lambda: "report.html" in shell.run(logs), "the last lines of the first node")

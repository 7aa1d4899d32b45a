"""A shell that uses the cluster of the tests, like the shell of a reader who follows a page."""

import shutil
from pathlib import Path
from typing import Any

from pages import ROOT, make_environment, play
from patience import PATIENCE


class Shell:
    """Runs commands with kubectl, helm and evergrad on the path and a namespace chosen."""

    def __init__(self, cluster: Any, folder: Path, *, namespace: str = "default") -> None:
        kubeconfig, programs = folder / "kubeconfig", folder / "bin"
        shutil.copy(cluster.kubeconfig, kubeconfig)
        programs.mkdir()
        for name in ("kubectl", "helm"):
            (programs / name).symlink_to(getattr(cluster, name))
        # kubectl and helm cache an API server's kinds for hours, but tests add and remove kinds.
        variables = make_environment(
            KUBECONFIG=str(kubeconfig), KUBECACHEDIR=str(folder / "kubectl-cache")
        )
        self._environment = {**variables, "PATH": f"{programs}:{variables['PATH']}"}
        self.run(f"kubectl config set-context --current --namespace {namespace}")

    def run(
        self,
        command: str,
        *,
        codes: tuple[int, ...] = (0,),
        seconds: float = PATIENCE + 60,
        folder: Path = ROOT,
    ) -> str:
        """Run a command, by default from the repository's root, and return its output.

        Its exit code must be one of ``codes``.
        """
        return play(
            command, folder, environment=self._environment, codes=codes, seconds=seconds
        )

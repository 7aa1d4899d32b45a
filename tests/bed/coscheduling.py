"""A scheduler with the coscheduling plug-in beside the bed's own: a process of the machine, under a name of its
own, and the PodGroup that it reads."""

import json
import subprocess
from typing import Final

import yaml

from bed import boxes, toolbox
from bed.api import Api, Object
from bed.places import KUBECONFIG, logs, work
from bed.shell import BedError, last_lines, wait_until

NAME: Final = "coscheduling"
"""Name of the scheduler, for ``schedulerName``."""
GROUPS: Final = "/apis/scheduling.x-k8s.io/v1alpha1"
_TYPE: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/podgroups.scheduling.x-k8s.io"
_PORT: Final = 18082


class Coscheduling:
    """The scheduler, with its type on the API server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._process: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """Bring the type; the scheduler runs when this returns."""
        source = toolbox.module("coscheduling", "sigs.k8s.io/scheduler-plugins")
        (definition,) = yaml.safe_load_all(
            (source / "manifests/coscheduling/crd.yaml").read_text()
        )
        self._api.apply(_TYPE, definition)
        wait_until("PodGroups", lambda: self._api.is_there(GROUPS), seconds=60)

        folder = work() / "coscheduling"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(json.dumps(_configuration()))
        command: list[object] = [
            toolbox.binary("coscheduling"),
            f"--config={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={_PORT}",
        ]
        self._process = boxes.spawn_outside("coscheduling", command, {})
        # It says nothing of its readiness that would not need a certificate: its log shows its informers.
        try:
            wait_until("the gang scheduler", self._is_ready, seconds=60, pause=0.2)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """End the scheduler; its type goes, and with it every PodGroup."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=30)
            self._process = None
        if self._api.is_there(_TYPE):
            self._api.delete(_TYPE)

    def _is_ready(self) -> bool:
        log = logs() / "coscheduling.log"
        if self._process is None or self._process.poll() is not None:
            raise BedError(f"the gang scheduler ended:\n{last_lines(log)}")
        return b"Serving securely" in log.read_bytes()


def _configuration() -> Object:
    plugins = {
        "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
        "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
    }
    arguments = {"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(KUBECONFIG)},
        "profiles": [
            {"schedulerName": NAME, "plugins": plugins, "pluginConfig": [arguments]},
        ],
    }

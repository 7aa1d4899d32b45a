"""A second scheduler beside the bed's, with the coscheduling plug-in of scheduler-plugins: it places the pods
of a PodGroup together or not at all."""

import json
import subprocess
from typing import Any, Final

import yaml

from bed import boxes, definitions, toolbox
from bed.api import Api
from bed.places import KUBECONFIG, logs, work
from bed.shell import BedError, last_lines, wait_until

SCHEDULER: Final = "scheduler-plugins-scheduler"
"""The name that pods give in ``schedulerName`` to be placed by it, as the project's own chart calls it."""
_MODULE: Final = "sigs.k8s.io/scheduler-plugins"


class Coscheduling:
    """The scheduler, and the type of its groups."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._process: subprocess.Popen[bytes] | None = None

    def bring_type(self) -> None:
        """Bring the PodGroup; nobody reads it before ``start``."""
        folder = toolbox.module("coscheduling", _MODULE) / "manifests/coscheduling"
        definitions.bring(self._api, yaml.safe_load((folder / "crd.yaml").read_text()))

    def start(self) -> None:
        """Start the scheduler; it watches pods when this returns."""
        config = work() / "coscheduling.yaml"
        config.write_text(json.dumps(_configuration()))
        # No port: the bed's own scheduler has the usual one.
        command = [
            toolbox.binary("gang-scheduler"),
            f"--config={config}",
            "--secure-port=0",
            "-v=3",
        ]
        self._process = boxes.spawn_outside("coscheduling", command, {})
        try:
            wait_until("the gang scheduler", self._is_ready, seconds=600, pause=0.2)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            boxes.end_outside(self._process)
            self._process = None

    def remove(self) -> None:
        """End it, and take the type away with all groups."""
        self.stop()
        definitions.take_away(self._api, "podgroups.scheduling.x-k8s.io")

    def _is_ready(self) -> bool:
        log = logs() / "coscheduling.log"
        if self._process is None or self._process.poll() is not None:
            raise BedError(f"the gang scheduler ended:\n{last_lines(log)}")
        return "Caches populated" in log.read_text("utf-8", errors="replace")


def _configuration() -> dict[str, Any]:
    plugin = {"name": "Coscheduling"}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(KUBECONFIG)},
        "profiles": [
            {
                "schedulerName": SCHEDULER,
                "plugins": {
                    "multiPoint": {"enabled": [plugin]},
                    "queueSort": {"enabled": [plugin], "disabled": [{"name": "*"}]},
                },
                "pluginConfig": [{**plugin, "args": {"permitWaitingTimeSeconds": 10}}],
            }
        ],
    }

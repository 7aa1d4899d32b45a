"""A second scheduler next to the bed's own, with the coscheduling plug-in of scheduler-plugins: it schedules
all pods of a PodGroup together, or none of them."""

import json
import subprocess
from typing import Any, Final

import yaml

from bed import boxes, definitions, toolbox
from bed.api import Api
from bed.places import KUBECONFIG, logs, work
from bed.shell import BedError, last_lines, wait_until

SCHEDULER: Final = "scheduler-plugins-scheduler"
"""The ``schedulerName`` of pods that this scheduler places, as in the project's own chart."""
_MODULE: Final = "sigs.k8s.io/scheduler-plugins"


class Coscheduling:
    """The scheduler, and the CRD of its groups."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._process: subprocess.Popen[bytes] | None = None

    def bring_type(self) -> None:
        """Create the CRD PodGroup, which is not used before ``start``."""
        folder = toolbox.module("coscheduling", _MODULE) / "manifests/coscheduling"
        definitions.bring(self._api, yaml.safe_load((folder / "crd.yaml").read_text()))

    def start(self) -> None:
        """Start the scheduler. It watches pods when this returns."""
        config = work() / "coscheduling.yaml"
        config.write_text(json.dumps(_configuration()))
        # Serve no port, because the bed's own scheduler uses the usual port.
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
        """Stop the scheduler."""
        if self._process is not None:
            boxes.end_outside(self._process)
            self._process = None

    def remove(self) -> None:
        """Stop the scheduler, and delete the CRD with all groups."""
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

"""Runs Kueue next to the bed: its manager is a process of the machine, and the API server calls its webhooks.

Kueue's chart is used unchanged, but only the CRDs and webhooks of the rendered objects are installed. Kueue
manages only namespaces with the label ``NAMESPACES``.
"""

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from bed import boxes, definitions, pki, toolbox
from bed.api import Api, Object
from bed.places import HOST_ADDRESS, KUBECONFIG, in_url, logs, work
from bed.places import pki as keys
from bed.shell import BedError, last_lines, run, wait_until

NAMESPACES: Final = "evergrad.dev/kueue"
"""Label, with the value ``true``, of the namespaces whose pods Kueue manages."""
QUEUES: Final = "/apis/kueue.x-k8s.io/v1beta2"
_HOOKS: Final = "/apis/admissionregistration.k8s.io/v1"
_PORT, _HEALTH_PORT = 19443, 18081
_KINDS: Final = {
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}


class Kueue:
    """Kueue's manager and its webhooks on the API server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._folder = work() / "kueue"
        self._process: subprocess.Popen[bytes] | None = None
        self._hooks: list[str] = []

    def install(self) -> None:
        """Install CRDs, certificates and webhooks. The manager runs when this returns."""
        authority = base64.b64encode((keys() / "ca.crt").read_bytes()).decode()
        rendered = _render()
        for one in rendered:
            if one["kind"] == "CustomResourceDefinition":
                self._create_type(one, authority)
        self._write_certificates()
        self.start()
        # Install the webhooks last, because the API server refuses requests if a webhook does not answer.
        for one in rendered:
            if one["kind"] in _KINDS:
                self._create_hooks(one, authority)

    def start(self, *, manages_all: bool = False) -> None:
        """Start the manager. ``manages_all``: also manage pods without a queue name."""
        config = self._folder / "config.yaml"
        config.write_text(json.dumps(_configuration(self._folder, manages_all=manages_all)))
        # Kueue looks for one of its certificates in a folder of /etc, regardless of its configuration, and
        # reads nothing else there.
        script = 'mount --bind "$0" /etc && exec "$@"'
        command: list[object] = [
            *("unshare", "--mount", "--propagation", "private"),
            *("bash", "-c", script, self._folder / "etc"),
            toolbox.binary("kueue-manager"),
            f"--kubeconfig={KUBECONFIG}",
            f"--config={config}",
            "--zap-log-level=2",
        ]
        self._process = boxes.spawn_outside("kueue", command, {})
        try:
            wait_until("Kueue's readiness", self._is_ready, seconds=600, pause=0.2)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the manager."""
        if self._process is not None:
            boxes.end_outside(self._process)
            self._process = None

    def remove(self) -> None:
        """End the manager, and delete its webhooks. Its CRDs stay as long as the bed exists."""
        for path in self._hooks:
            self._api.delete(path)
        self._hooks.clear()
        self.stop()

    def _is_ready(self) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            raise BedError(f"Kueue ended:\n{last_lines(logs() / 'kueue.log')}")
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{_HEALTH_PORT}/readyz", timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _write_certificates(self) -> None:
        pair = pki.Certificate("/CN=kueue", f"IP:{HOST_ADDRESS}")
        pki.sign(keys(), "kueue", pair)
        for folder in (self._folder / "certs", self._folder / "etc/kueue/metrics/certs"):
            folder.mkdir(parents=True, exist_ok=True)
            for suffix in ("crt", "key"):
                shutil.copyfile(keys() / f"kueue.{suffix}", folder / f"tls.{suffix}")

    def _create_type(self, one: Object, authority: str) -> None:
        conversion = one["spec"].get("conversion") or {}
        if conversion.get("webhook"):
            conversion["webhook"]["clientConfig"] = _client("/convert", authority)
        definitions.bring(self._api, {**one, "metadata": {"name": one["metadata"]["name"]}})

    def _create_hooks(self, one: Object, authority: str) -> None:
        hooks = []
        for hook in one["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            is_of_pods = path.endswith("--v1-pod")
            if not is_of_pods and "kueue-x-k8s-io" not in path:
                continue
            selector = {"matchLabels": {NAMESPACES: "true"}}
            scope = {"namespaceSelector": selector} if is_of_pods else {}
            hooks.append({**hook, **scope, "clientConfig": _client(path, authority)})
        name = one["metadata"]["name"]
        path = f"{_HOOKS}/{_KINDS[one['kind']]}/{name}"
        # Record the path first, so that a partly created object is removed too.
        self._hooks.append(path)
        self._api.apply(path, {**one, "metadata": {"name": name}, "webhooks": hooks})


def _client(path: str, authority: str) -> dict[str, Any]:
    """Return the webhook's client config with a URL, because the manager has no Service."""
    return {"url": f"https://{in_url(HOST_ADDRESS)}:{_PORT}{path}", "caBundle": authority}


def _render() -> list[Object]:
    chart = toolbox.module("kueue", "sigs.k8s.io/kueue") / "charts/kueue"
    words = [
        toolbox.binary("helm"),
        "template",
        "kueue",
        chart,
        "--namespace",
        "kueue-system",
    ]
    documents: Iterator[Any] = yaml.load_all(run(words), Loader=yaml.CSafeLoader)
    return [one for one in documents if one]


def _configuration(folder: Path, *, manages_all: bool) -> Object:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": f":{_HEALTH_PORT}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": _PORT, "certDir": str(folder / "certs")},
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        # This feature would need its own API server, registered with the bed's.
        "featureGates": {"VisibilityOnDemand": False},
        "controller": {
            "groupKindConcurrency": {
                "Pod": 5,
                "Workload.kueue.x-k8s.io": 10,
                "LocalQueue.kueue.x-k8s.io": 5,
                "ClusterQueue.kueue.x-k8s.io": 5,
                "ResourceFlavor.kueue.x-k8s.io": 1,
            }
        },
        "manageJobsWithoutQueueName": manages_all,
        "managedJobsNamespaceSelector": {"matchLabels": {NAMESPACES: "true"}},
        "integrations": {"frameworks": ["pod"]},
    }

"""Runs Prometheus next to the bed. It is built from its module, and configured from monitors and rules by
Prometheus Operator's own code (tools/promconfig).

Prometheus is a process of the machine, from which all pods are reachable. It finds its targets through the
API server as the ServiceAccount ``prometheus`` of NAMESPACE, with the rights that Prometheus has in a
cluster.
"""

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bed import boxes, definitions, toolbox
from bed.api import Api, Object
from bed.places import API_SERVER, logs
from bed.places import pki as keys
from bed.shell import BedError, last_lines, run, wait_until

NAMESPACE: Final = "monitoring"
"""Namespace that the NetworkPolicies of runs allow to scrape metrics by default."""
GROUP: Final = "/apis/monitoring.coreos.com/v1"
KINDS: Final = ("podmonitors", "servicemonitors", "prometheusrules")
_OPERATOR: Final = "github.com/prometheus-operator/prometheus-operator"
_NEWEST: Final = "v3.3.0"
"""Newest Prometheus that this release of the operator supports; later releases accept its configuration."""
_VARIABLES: Final = {"$(SHARD)": "0", "$(POD_NAME)": "prometheus-0"}
"""Variables that the operator's sidecar fills in next to each Prometheus."""
_RIGHTS: Final = [
    {
        "apiGroups": [""],
        "resources": ["services", "endpoints", "pods"],
        "verbs": ["get", "list", "watch"],
    },
    {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    },
]


# ---- configuration -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """The output of Prometheus Operator for a Prometheus: its configuration, and its rule files by name."""

    text: str
    rules: Mapping[str, str]

    @property
    def jobs(self) -> dict[str, Any]:
        """Return the scrape configurations by job name."""
        return {one["job_name"]: one for one in yaml.safe_load(self.text)["scrape_configs"]}

    def write(self, folder: Path) -> Path:
        """Write all files below ``folder``, and return the path of the configuration."""
        (folder / "rules").mkdir(parents=True, exist_ok=True)
        for name, text in self.rules.items():
            (folder / "rules" / name).write_text(text)
        text = self.text
        for variable, value in _VARIABLES.items():
            text = text.replace(variable, value)
        made = {**yaml.safe_load(text), "rule_files": [str(folder / "rules/*.yaml")]}
        path = folder / "prometheus.yaml"
        path.write_text(yaml.safe_dump(made, sort_keys=False))
        return path


def describe_server(
    labels: Mapping[str, str], *, interval: str, api: Mapping[str, Any] | None = None
) -> Object:
    """Return a Prometheus object that selects monitors and rules with these labels in all namespaces.

    ``interval``: time between two evaluations of rules. ``api``: address and credentials of the API server;
    the default is the access of a pod.
    """
    by_label = {"matchLabels": dict(labels)}
    selectors: Object = {}
    for kind in ("serviceMonitor", "podMonitor", "rule"):
        selectors |= {f"{kind}Selector": by_label, f"{kind}NamespaceSelector": {}}
    spec: Object = {
        "version": _NEWEST,
        "scrapeInterval": "30s",
        "evaluationInterval": interval,
        "serviceDiscoveryRole": "EndpointSlice",
        **selectors,
    }
    if api is not None:
        spec["apiserverConfig"] = dict(api)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": "tests", "namespace": NAMESPACE},
        "spec": spec,
    }


def configure(
    server: Object, objects: Sequence[Object], *, namespaces: Sequence[str]
) -> Configuration:
    """Return the operator's configuration of ``server`` for these monitors and rules.

    Raises BedError with the operator's reason if it would refuse one of them.
    """
    question = {
        "prometheus": server,
        "namespaces": [{"metadata": {"name": name}} for name in namespaces],
        "objects": list(objects),
    }
    said = toolbox.ask("promconfig", question)
    return Configuration(said["config"], said["rules"])


def check(configuration: Configuration, folder: Path) -> str:
    """Run `promtool check config` on the files below ``folder``, including the rules. Raises BedError with
    its findings."""
    path = configuration.write(folder)
    return run([toolbox.binary("promtool"), "check", "config", path])


# ---- a running server --------------------------------------------------------------------------------------


class Client:
    """The HTTP API of a Prometheus on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a response.

        Raises ValueError with Prometheus' message if it refuses the request, and OSError if it is not ready.
        """
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self._root}{path}{query}", timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise
            raise ValueError(f"{path}: {error.code} {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the vector of an instant query; a scalar becomes a vector with one element."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        found: list[dict[str, Any]] = data["result"]
        return found

    def query_since(
        self, expression: str, begin: float, *, step: float
    ) -> list[dict[str, Any]]:
        """Return the series of a range query from ``begin``, in seconds since 1970, until now."""
        data = self.get(
            "query_range",
            query=expression,
            start=str(begin),
            end=str(time.time()),
            step=str(step),
        )
        found: list[dict[str, Any]] = data["result"]
        return found

    def find_selectors(self, expression: str) -> set[str]:
        """Return the series selectors in an expression, as parsed by Prometheus."""
        found = set()
        for one in _walk(self.get("parse_query", query=expression)):
            matchers = [
                f"{each['name']}{each['type']}{json.dumps(each['value'])}"
                for each in one["matchers"]
                if each["name"] != "__name__"
            ]
            found.add(f"{one['name']}{{{','.join(sorted(matchers))}}}")
        return found

    def targets(self) -> list[dict[str, Any]]:
        """Return the targets that are scraped, with their labels, health and last error."""
        found: list[dict[str, Any]] = self.get("targets", state="active")["activeTargets"]
        return found


def _walk(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all selectors in a node of a parsed expression and its descendants."""
    if isinstance(node, list):
        for one in node:
            yield from _walk(one)
    elif isinstance(node, dict):
        if node.get("type") in ("vectorSelector", "matrixSelector"):
            yield node
        for value in node.values():
            yield from _walk(value)


@contextlib.contextmanager
def serve(
    configuration: Configuration,
    folder: Path,
    *,
    is_beside_the_bed: bool = False,
) -> Iterator[Client]:
    """Run a Prometheus inside the block, with its files below ``folder``.

    ``is_beside_the_bed``: it also ends with the bed, and its log is among the bed's logs.
    """
    path = configuration.write(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    log = logs() / "prometheus.log" if is_beside_the_bed else folder / "log"
    command: list[object] = [
        toolbox.binary("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = (
        boxes.spawn_outside("prometheus", command, {})
        if is_beside_the_bed
        else _spawn(command, log)
    )
    client = Client(port)

    def is_ready() -> bool:
        if process.poll() is not None:
            raise BedError(f"Prometheus ended:\n{last_lines(log)}")
        try:
            client.get("status/buildinfo")
        except OSError:
            return False
        return True

    try:
        wait_until("Prometheus' readiness", is_ready, seconds=600, pause=0.1)
        yield client
    finally:
        process.kill()
        process.wait(timeout=30)


def _spawn(command: Sequence[object], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


# ---- beside the bed ----------------------------------------------------------------------------------------


def install_types(api: Api) -> None:
    """Install the CRDs of monitors and rules on the API server. They stay as long as the bed exists."""
    folder = toolbox.module("promconfig", _OPERATOR) / "example/prometheus-operator-crd"
    for kind in KINDS:
        one = yaml.safe_load((folder / f"monitoring.coreos.com_{kind}.yaml").read_text())
        definitions.bring(api, one)


def remove_types(api: Api) -> None:
    """Delete these CRDs with all of their objects."""
    for kind in KINDS:
        definitions.take_away(api, f"{kind}.monitoring.coreos.com")


def read_objects(api: Api) -> list[Object]:
    """Return all monitors and rules of the cluster."""
    found = []
    for kind in KINDS:
        listed = api.get(f"{GROUP}/{kind}")
        for one in listed["items"]:
            name = listed["kind"].removesuffix("List")
            found.append({"apiVersion": listed["apiVersion"], "kind": name, **one})
    return found


def grant_access(api: Api, folder: Path) -> Object:
    """Create NAMESPACE and the ServiceAccount, with files in ``folder``. Returns ``api`` of
    `describe_server`."""
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    rights = "/apis/rbac.authorization.k8s.io/v1"
    name = {"name": "prometheus"}
    for path, body in (
        (
            f"/api/v1/namespaces/{NAMESPACE}",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        ),
        (
            f"{accounts}/prometheus",
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        ),
        (f"{rights}/clusterroles/prometheus", _rbac("ClusterRole", rules=_RIGHTS)),
        (
            f"{rights}/clusterrolebindings/prometheus",
            _rbac(
                "ClusterRoleBinding",
                roleRef={
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "prometheus",
                },
                subjects=[
                    {"kind": "ServiceAccount", "name": "prometheus", "namespace": NAMESPACE}
                ],
            ),
        ),
    ):
        api.apply(path, body)
    asked = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 86400},
    }
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(api.create(f"{accounts}/prometheus/token", asked)["status"]["token"])
    return {
        "host": API_SERVER,
        "authorization": {"type": "Bearer", "credentialsFile": str(token)},
        "tlsConfig": {"caFile": str(keys() / "ca.crt")},
    }


def _rbac(kind: str, **content: Any) -> Object:
    version = "rbac.authorization.k8s.io/v1"
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "prometheus"},
        **content,
    }

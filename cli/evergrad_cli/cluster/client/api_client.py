"""Sends requests to the API server; no other module does. Returns answers as dicts and raises this package's
errors."""

import argparse
import contextlib
import importlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast
from urllib.parse import quote, urlencode

import yaml

from evergrad_cli import __version__
from evergrad_cli.cluster.client.errors import (
    KubeconfigError,
    MissingClientError,
    NotFoundError,
    UnreachableError,
)
from evergrad_cli.cluster.client.refusals import error_of
from evergrad_common.contract import API_GROUP
from evergrad_manifest.errors import Problem

FIELD_MANAGER: Final = "evergrad-cli"
MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
_PAGE: Final = 500
"""Objects in one page of a list, the same number as kubectl, so that a list of any length takes bounded
memory."""
_CONNECT_SECONDS: Final = 10.0
_READ_SECONDS: Final = 30.0
"""A user waits for the answer. The API server ends its own requests after 60 seconds."""
_FORWARD_PROTOCOL: Final = "v4.channel.k8s.io"
"""Websocket subprotocol of a forwarded port. Its channels are data and errors."""
_EXEC_PROTOCOL: Final = "v4.channel.k8s.io"
"""Websocket subprotocol of a command in a pod. Its channels are stdin, stdout, stderr and the exit status."""
_EXEC_SECONDS: Final = 180.0
"""Time for a debugger to read all processes of one pod, one after the other."""
_IN_CLUSTER_NAMESPACE: Final = Path(
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
)
_VERSION: Final = "v1alpha1"

Query = Mapping[str, str]


class Cluster(Protocol):
    """Interface of a cluster that commands use.

    Every method raises the error that ``refusals.error_of`` returns for a refusal, or UnreachableError.
    """

    namespace: str
    """Namespace of the command: ``--namespace``, or else the namespace of the context."""
    host: str
    """Address of the API server."""

    def get(self, path: str, *, what: str, query: Query | None = None) -> dict[str, Any]:
        """Return the object at ``path``."""

    def items(
        self, path: str, *, what: str, query: Query | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield all objects of a list, page by page."""

    def send(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        what: str,
        content_type: str = "application/json",
        query: Query | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """POST or PATCH ``body``. Return the HTTP status and the answer."""

    def lines(
        self,
        path: str,
        *,
        what: str,
        query: Query | None = None,
        read_seconds: float | None = None,
    ) -> Iterator[bytes]:
        """Yield the lines of a text as they arrive, without line ends. Raises UnreachableError if no data
        arrive for ``read_seconds``."""

    def execute(self, pod: str, container: str, command: Sequence[str]) -> str:
        """Run ``command`` in a pod of the namespace and return its stdout."""

    def connect_to_pod(self, pod: str, port: int) -> socket.socket:
        """Return a connection to a port of a pod of the namespace, through the API server and the kubelet."""


def runs_path(namespace: str | None, name: str = "") -> str:
    """Return the path of the TrainingRuns of a namespace, of all namespaces if it is None, or of one run."""
    within = f"/namespaces/{quote(namespace, safe='')}" if namespace is not None else ""
    return f"/apis/{API_GROUP}/{_VERSION}{within}/trainingruns" + (
        f"/{quote(name, safe='')}" if name else ""
    )


def core_path(kind: str, namespace: str | None = None, name: str = "") -> str:
    """Return the path of objects of the core API, for example of ``pods`` or ``events``."""
    within = f"/namespaces/{quote(namespace, safe='')}" if namespace is not None else ""
    return f"/api/v1{within}/{kind}" + (f"/{quote(name, safe='')}" if name else "")


def find(cluster: Cluster, path: str, *, what: str) -> dict[str, Any] | None:
    """Return the object at ``path``, or None if it does not exist."""
    try:
        return cluster.get(path, what=what)
    except NotFoundError:
        return None


@dataclass(frozen=True)
class _Request:
    """One request. ``what`` is the name of the requested object in messages."""

    method: str
    path: str
    what: str
    query: Query | None = None
    body: Any = None
    content_type: str = ""


class KubernetesCluster:
    """A cluster, with the TLS, proxies and credentials of the official client and our own requests."""

    def __init__(self, api: Any, *, namespace: str) -> None:
        self.namespace = namespace
        self.host: str = api.configuration.host
        self._api = api
        # Import urllib3 here: it is a dependency of the client, and `evergrad --help` needs neither.
        self._failures: tuple[type[Exception], ...] = (
            importlib.import_module("urllib3").exceptions.HTTPError,
            importlib.import_module("kubernetes.client").ApiException,
            OSError,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._api.close()

    def get(self, path: str, *, what: str, query: Query | None = None) -> dict[str, Any]:
        return self._exchange(_Request("GET", path, what, query))[1]

    def items(
        self, path: str, *, what: str, query: Query | None = None
    ) -> Iterator[dict[str, Any]]:
        pages = {"limit": str(_PAGE), **(query or {})}
        while True:
            answer = self.get(path, what=what, query=pages)
            yield from answer.get("items") or ()
            # The last page has no token. The token of the next page is valid for a few minutes.
            rest = (answer.get("metadata") or {}).get("continue")
            if not rest:
                return
            pages["continue"] = rest

    def send(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        what: str,
        content_type: str = "application/json",
        query: Query | None = None,
    ) -> tuple[int, dict[str, Any]]:
        # The client converts a body to JSON unless its type is YAML. Write JSON here, which is valid YAML,
        # too.
        text = json.dumps(body) if content_type == APPLY else body
        return self._exchange(_Request(method, path, what, query, text, content_type))

    def lines(
        self,
        path: str,
        *,
        what: str,
        query: Query | None = None,
        read_seconds: float | None = None,
    ) -> Iterator[bytes]:
        response = self._open(_Request("GET", path, what, query), read_seconds=read_seconds)

        # A line may arrive in several chunks, and a chunk may hold several lines.
        with contextlib.closing(response.response) as stream, self._translated(what):
            if response.status >= 300:
                raise error_of(response.status, response.read(), what=what)
            rest = b""
            for chunk in stream.stream(2**16, decode_content=True):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
            if rest:
                yield rest

    def execute(self, pod: str, container: str, command: Sequence[str]) -> str:
        path, what = f"{core_path('pods', self.namespace, pod)}/exec", f"pod {pod}"
        headers = {"sec-websocket-protocol": _EXEC_PROTOCOL}
        query = [("command", word) for word in command]
        query += [("container", container), ("stdout", "true"), ("stderr", "false")]
        websockets = importlib.import_module("kubernetes.stream.ws_client")
        with self._translated(what):
            self._api.update_params_for_auth(
                headers, [], ["BearerToken"], path, "GET", None
            )
            try:
                response = websockets.websocket_call(
                    self._api.configuration,
                    "GET",
                    self.host + path,
                    query_params=query,
                    headers=headers,
                    _request_timeout=_EXEC_SECONDS,
                )
            except websockets.ApiException as error:
                raise _refusal_of(error, what) from error
        return str(response.data)

    def connect_to_pod(self, pod: str, port: int) -> socket.socket:
        path, what = f"{core_path('pods', self.namespace, pod)}/portforward", f"pod {pod}"
        headers = {"sec-websocket-protocol": _FORWARD_PROTOCOL}
        websockets = importlib.import_module("kubernetes.stream.ws_client")
        with self._translated(what):
            self._api.update_params_for_auth(
                headers, [], ["BearerToken"], path, "GET", None
            )
            try:
                forward = websockets.portforward_call(
                    self._api.configuration,
                    "GET",
                    self.host + path,
                    query_params=[("ports", str(port))],
                    headers=headers,
                )
            except websockets.ApiException as error:
                raise _refusal_of(error, what) from error
        connection: socket.socket = forward.socket(port)
        return connection

    def _exchange(self, request: _Request) -> tuple[int, dict[str, Any]]:
        response = self._open(request, read_seconds=_READ_SECONDS)
        with self._translated(request.what):
            data = response.read()
        # Even a success may be the login page of a proxy, which is not JSON.
        if response.status >= 300:
            raise error_of(response.status, data, what=request.what)
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UnreachableError(
                f"{request.what}: {self.host} did not return a JSON object. Is it a Kubernetes API server?"
            )
        return response.status, answer

    def _open(self, request: _Request, *, read_seconds: float | None) -> Any:
        # Use the client's own request, so that expired credentials are renewed. The answer is read as it
        # arrives.
        headers = {
            "Accept": "application/json, */*",
            "User-Agent": f"{FIELD_MANAGER}/{__version__}",
        }
        if request.content_type:
            headers["Content-Type"] = request.content_type
        url = (
            self.host
            + request.path
            + (f"?{urlencode(request.query)}" if request.query else "")
        )
        with self._translated(request.what):
            self._api.update_params_for_auth(
                headers, [], ["BearerToken"], request.path, request.method, request.body
            )
            return self._api.call_api(
                request.method,
                url,
                header_params=headers,
                body=request.body,
                _request_timeout=(_CONNECT_SECONDS, read_seconds),
            )

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            # Use the innermost reason of urllib3's chain, without the address that its messages repeat. For
            # example, remove "HTTPSConnection(host='10.0.0.1', port=6443): " before "Failed to …".
            reason: Any = getattr(error, "reason", None)
            while getattr(reason, "reason", None) is not None:
                reason = reason.reason
            text = str(reason or error).strip() or type(error).__name__
            text = text.partition("): ")[2] or text.partition(">: ")[2] or text
            raise UnreachableError(
                f"{what}: {self.host} cannot be reached; {text}. Check the context and the "
                "network, or try again."
            ) from error


def _refusal_of(error: Any, what: str) -> Exception:
    """Return the error for the API server's answer to a websocket request, or ``error`` itself if there is no
    answer."""
    # The client wraps every failure in the same error: the API server's answer is in the cause.
    status = getattr(error.__context__, "status_code", 0)
    if status < 400:
        return cast(Exception, error)
    body = getattr(error.__context__, "resp_body", None) or b""
    return error_of(status, body, what=what)


def connect(args: argparse.Namespace) -> KubernetesCluster:
    """Return the cluster that ``--kubeconfig``, ``--context`` and ``--namespace`` name.

    Raises MissingClientError, KubeconfigError.
    """
    try:
        config = importlib.import_module("kubernetes.config")
        client = importlib.import_module("kubernetes.client")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kubernetes":
            raise
        raise MissingClientError from error
    settings = type.__call__(client.Configuration)
    namespace = _load(config, settings, args)

    # TCP keep-alive ends a stream whose peer has vanished. Retry a failed connection twice, within a second:
    # a command that has to wait longer retries by itself.
    settings.keep_alive = True
    urllib3 = importlib.import_module("urllib3")
    settings.retries = urllib3.util.Retry(
        total=2, connect=2, read=0, redirect=0, backoff_factor=0.2
    )
    if not settings.verify_ssl:
        # The kubeconfig requests this (insecure-skip-tls-verify), so do not print a warning at each request.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return KubernetesCluster(
        client.ApiClient(settings), namespace=args.namespace or namespace or "default"
    )


def _load(config: Any, settings: Any, args: argparse.Namespace) -> str | None:
    """Fill ``settings`` and return the namespace of the context."""
    file = str(args.kubeconfig) if args.kubeconfig is not None else None
    try:
        # In a pod there is usually no kubeconfig. If none is named, use the pod's service account.
        places = str(config.KUBE_CONFIG_DEFAULT_LOCATION).split(":")
        has_kubeconfig = any(Path(place).expanduser().exists() for place in places if place)
        if file is None and args.context is None and not has_kubeconfig:
            config.load_incluster_config(client_configuration=settings)
            return _IN_CLUSTER_NAMESPACE.read_text().strip()
        # Do not use the client's own two functions: the function that returns the namespace requires a
        # current context even if the user names another context.
        found = config.kube_config.KubeConfigMerger(file or ":".join(places)).config
        if found is None:
            raise config.ConfigException("no such file")
        loader = config.kube_config.KubeConfigLoader(found, active_context=args.context)
        loader.load_and_set(settings)
        context = loader.current_context.get("context") or {}
    except (
        config.ConfigException,
        yaml.YAMLError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:
        where = (
            f"kubeconfig {args.kubeconfig}" if args.kubeconfig is not None else "kubeconfig"
        )
        where += f", context {args.context}" if args.context is not None else ""
        # Some messages have several lines, and a problem has one. YAML errors name the place in the last
        # line.
        lines = (
            str(error)
            .strip()
            .splitlines()[: None if isinstance(error, yaml.YAMLError) else 1]
        )
        why = " ".join(line.strip() for line in lines)
        remedy = (
            "Name a file with --kubeconfig or KUBECONFIG, and one of its contexts (kubectl "
            "config get-contexts)"
        )
        raise KubeconfigError(Problem(where, "cannot be used", why, remedy)) from error

    # Use the namespace of the selected context, as kubectl does.
    namespace = context.get("namespace")
    return str(namespace) if namespace else None

"""A small API server client that uses only the standard library. Watches are generators."""

import base64
import http.client
import json
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

Object = dict[str, Any]


class ApiError(Exception):
    """Raised if the API server refuses a request. `status`: HTTP code. `reason`: the server's reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Api:
    """The API server of a kubeconfig's current context. Paths are those of `kubectl get --raw`."""

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        named = {
            kind: {entry["name"]: entry for entry in content[kind]}
            for kind in ("contexts", "clusters", "users")
        }
        context = named["contexts"][content["current-context"]]["context"]
        cluster, user = (
            named["clusters"][context["cluster"]]["cluster"],
            named["users"][context["user"]]["user"],
        )
        address = urlsplit(cluster["server"])
        self._host, self._port = address.hostname or "localhost", address.port or 443
        self._headers = {"Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        self._tls = ssl.create_default_context(
            cadata=_text(cluster, "certificate-authority", kubeconfig.parent) or None
        )
        pair = [
            _text(user, name, kubeconfig.parent)
            for name in ("client-certificate", "client-key")
        ]
        if all(pair):
            with tempfile.NamedTemporaryFile(
                "w", suffix=".pem"
            ) as file:  # ssl reads client certificates only from files
                file.write("\n".join(pair))
                file.flush()
                self._tls.load_cert_chain(file.name)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        timeout: float = 30,
    ) -> Any:
        """Send one request, and return the decoded answer (text if the answer is not JSON).

        Raises ApiError if the server refuses the request, and OSError if it cannot be reached.
        """
        connection = self._connection(timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**self._headers, "Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise _error(answer.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str) -> Any:
        """Read one object or a list."""
        return self.request("GET", path)

    def create(self, path: str, body: Object) -> Object:
        """Create an object with a POST to its collection."""
        created: Object = self.request("POST", path, body)
        return created

    def patch(
        self, path: str, body: Object, *, kind: str = "application/merge-patch+json"
    ) -> Object:
        """Patch an object or its subresource, by default with a merge patch."""
        patched: Object = self.request("PATCH", path, body, kind=kind)
        return patched

    def apply(self, path: str, body: Object, *, manager: str = "bed") -> Object:
        """Apply an object server-side, with force."""
        query = urlencode({"fieldManager": manager, "force": "true"})
        return self.patch(f"{path}?{query}", body, kind="application/apply-patch+yaml")

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object. Does nothing if the object does not exist.

        `options` are fields of DeleteOptions, for example gracePeriodSeconds=0.
        """
        try:
            self.request("DELETE", path, options or None)
        except ApiError as error:
            if error.status != 404:
                raise

    def is_there(self, path: str) -> bool:
        """Return whether the object exists. Returns False if the server cannot be reached."""
        try:
            self.get(path)
        except (ApiError, OSError):
            return False
        return True

    def watch(self, path: str, *, seconds: int = 300) -> Iterator[tuple[str, Object]]:
        """Yield ("ADDED" | "MODIFIED" | "DELETED", object): existing objects first, then changes.

        The watch starts again after every interruption.
        """
        while True:
            try:
                listed = self.get(path)
                for item in listed["items"]:
                    yield "ADDED", item
                version = listed["metadata"]["resourceVersion"]
                for event in self._events(path, version, seconds):
                    if event["type"] == "ERROR":  # mostly 410: too old
                        break
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]
            except (ApiError, OSError, http.client.HTTPException, json.JSONDecodeError):
                time.sleep(0.3)

    def _events(self, path: str, version: str, seconds: int) -> Iterator[Object]:
        query = urlencode(
            {
                "watch": "1",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": seconds,
            }
        )
        connection = self._connection(seconds + 30)
        try:
            connection.request("GET", f"{path}?{query}", headers=self._headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _error(answer.status, answer.read().decode())
            while line := answer.readline():
                yield json.loads(line)
        finally:
            connection.close()

    def _connection(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            self._host, self._port, context=self._tls, timeout=timeout
        )


def _error(status: int, text: str) -> ApiError:
    try:
        answer = json.loads(text)
        return ApiError(status, answer.get("reason", ""), answer.get("message", ""))
    except (json.JSONDecodeError, AttributeError):
        return ApiError(status, "", text[:300])


def _text(section: Object, name: str, folder: Path) -> str:
    """Return the content of `name` from the kubeconfig or from the file that it references.

    Returns an empty text if the kubeconfig has neither.
    """
    data = section.get(f"{name}-data")
    if data:
        return base64.b64decode(data).decode()
    return (folder / section[name]).read_text() if section.get(name) else ""

"""A running webhook, a fake API server, and the requests that it sends."""

import base64
import copy
import json
import ssl
from dataclasses import replace
from typing import Any

import aiohttp
from fake_kubernetes.recipe import TRAINING

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import EARLY_WEBHOOK, SECRET, WEBHOOK, Kind
from evergrad_operator.edge.webhook.server import WEBHOOK_NAME, Webhook, WebhookSettings

NAMES = ("operator.evergrad.svc", "operator.evergrad.svc.cluster.local")


def make_object(*, status: Any = None, metadata: Any = None, **spec: Any) -> dict[str, Any]:
    """A TrainingRun as the API server sends it."""
    return {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {
            "name": "docs-lm",
            "namespace": "team",
            "uid": "u",
            **(metadata or {}),
        },
        "spec": {
            "nodes": {"min": 1, "max": 2},
            "training": copy.deepcopy(TRAINING),
            **spec,
        },
        **({"status": status} if status else {}),
    }


class Store:
    """The API server's Secrets and webhook configurations."""

    def __init__(self) -> None:
        self.secrets: dict[str, Any] = {}
        self.configuration: dict[str, Any] | None = {
            "metadata": {"name": "evergrad"},
            "webhooks": [{"name": WEBHOOK_NAME, "clientConfig": {"service": {}}}],
        }
        self.early = copy.deepcopy(self.configuration)
        self.writes: list[str] = []

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        if kind in (WEBHOOK, EARLY_WEBHOOK):
            return self.configuration if kind is WEBHOOK else self.early
        assert (kind, namespace) == (SECRET, "evergrad")
        return copy.deepcopy(self.secrets.get(name))

    async def create(
        self, body: Any, *, is_fenced: bool = True, is_brief: bool = False
    ) -> Any:
        if body["metadata"]["name"] in self.secrets:
            raise ApiError(409, "AlreadyExists", "it exists")
        return self._store("create", body)

    async def replace(self, body: Any, *, is_fenced: bool = True) -> Any:
        # The API server has two rules for Secrets: the type cannot change, and a TLS Secret has both of its
        # keys.
        name = body["metadata"]["name"]
        if body.get("type") != self.secrets[name].get("type"):
            raise ApiError(422, "Invalid", "type: field is immutable")
        if body.get("type") == "kubernetes.io/tls":
            assert {"tls.crt", "tls.key"} <= body["data"].keys()
        return self._store("replace", body)

    async def apply(
        self, body: Any, *, subresource: str = "", manager: str = "", is_brief: bool = False
    ) -> Any:
        configuration = self.configuration if body["kind"] == WEBHOOK.kind else self.early
        assert configuration is not None
        self.writes.append("apply")
        ((hook,), (change,)) = configuration["webhooks"], body["webhooks"]
        assert hook["name"] == change["name"]
        hook["clientConfig"] |= change["clientConfig"]
        return {}

    def _store(self, verb: str, body: Any) -> Any:
        self.writes.append(verb)
        self.secrets[body["metadata"]["name"]] = copy.deepcopy(body)
        return body

    @property
    def trusted(self) -> bytes:
        assert self.configuration is not None
        return base64.b64decode(
            self.configuration["webhooks"][0]["clientConfig"]["caBundle"]
        )


SETTINGS = WebhookSettings(
    "127.0.0.1", 0, "evergrad", "operator", "certificate", "evergrad"
)


def make_webhook(store: Store, *, leads: bool = True, files: str = "") -> Webhook:
    return Webhook(replace(SETTINGS, files=files), store, leads=lambda: leads)


async def post(webhook: Webhook, authority: bytes, body: bytes) -> tuple[int, Any]:
    """Like the API server, trust only the bundle, and request the Service's name."""
    context = ssl.create_default_context(cadata=authority.decode())
    url = f"https://127.0.0.1:{webhook.port}/validate"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, ssl=context, server_hostname=NAMES[0]) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if answer.status == 200 else text

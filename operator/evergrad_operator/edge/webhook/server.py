"""The validating webhook: a server of its own port, and the certificate that the API server trusts.

It is registered twice. As a validating webhook it has the last word. As a mutating one, which never changes
anything, it is asked before the API server checks types and bounds itself, so that all problems of a file are
reported at once, in the words of ``evergrad validate``.

Every replica serves, also one that waits for the lease: an answer needs no right to write. Only the holder of
the lease makes the certificate and registers its authority with the API server. No fault of the webhook ends
the operator: without it a run is checked before its first pod.
"""

import asyncio
import base64
import contextlib
import json
import logging
import re
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from aiohttp import web

from evergrad_common.addresses import open_listener
from evergrad_manifest.model.nesting import cut_deep
from evergrad_operator.core.admission import (
    deny_depth,
    deny_size,
    has_too_many_values,
    review,
)
from evergrad_operator.core.objects.errors import ApiError, LeaseLostError
from evergrad_operator.core.objects.installation import NOTHING_ALLOWED, Installation
from evergrad_operator.core.objects.kinds import EARLY_WEBHOOK, SECRET, WEBHOOK, Kind, Raw
from evergrad_operator.core.objects.names import LABEL_MANAGED_BY, MANAGED_BY
from evergrad_operator.core.observe.profiles import NamespaceProfile
from evergrad_operator.edge.webhook.request_limits import (
    MAX_REQUEST_BYTES,
    Bodies,
    Connections,
    end_after_answer,
)

if TYPE_CHECKING:
    from evergrad_operator.edge.webhook.certificates import Bundle

log = logging.getLogger(__name__)
PATH: Final = "/validate"
WEBHOOK_NAME: Final = "trainingruns.evergrad.dev"
"""Name of the one webhook in the chart's configuration."""
FIELD_MANAGER: Final = "evergrad-webhook"
_UID: Final = re.compile(rb'"request":\s*\{\s*"uid":\s*"([0-9A-Za-z-]+)"')
_START_BYTES: Final = 4096
"""Part of a request in which the API server writes its uid, before any text of the user's."""
_AT_A_TIME: Final = 4
"""Checks that run at the same time, in threads: a large file must not hold up the operator's own work."""
_LARGE_BYTES: Final = 2**15
"""Requests above this size are checked one at a time: read as JSON, one takes 40 times its size and more."""
_LOOK_SECONDS: Final = 60.0
"""Time between two looks at the certificate: another replica, or cert-manager, may have renewed it."""
_PROFILE_SECONDS: Final = 3.0
"""Longest time for reading the profile of a namespace: the API server waits 10 s for an answer."""
_FIRST_LOOKS_SECONDS: Final = 2.0
"""Time between two looks while there is none: the holder of the lease makes one soon."""


@dataclass(frozen=True)
class WebhookSettings:
    """Address of the webhook's server, and the names of its objects.

    ``files``: a folder with tls.crt and tls.key that another program, such as cert-manager, keeps.
    ``is_early``: it is registered as a mutating webhook, too.
    """

    host: str
    port: int
    namespace: str
    service: str
    secret: str
    configuration: str
    files: str = ""
    is_early: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the certificate is for; the API server calls the first."""
        return (
            f"{self.service}.{self.namespace}.svc",
            f"{self.service}.{self.namespace}.svc.cluster.local",
        )


class CertificateStore(Protocol):
    """The part of the API server that the webhook needs; ``Kube`` is one. All raise ApiError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """Return the object, or None."""

    async def create(
        self,
        body: Raw,
        *,
        is_fenced: bool = True,
        is_brief: bool = False,
    ) -> Raw:
        """Create an object."""

    async def replace(self, body: Raw, *, is_fenced: bool = True) -> Raw:
        """Replace the whole object, if nobody has changed it meanwhile."""

    async def apply(
        self,
        body: Raw,
        *,
        subresource: str = "",
        manager: str = "",
        is_brief: bool = False,
    ) -> Raw:
        """Apply the complete intent of ``manager`` server-side."""


FetchProfile = Callable[[str], Awaitable[NamespaceProfile | None]]
"""Returns the profile of a namespace; None if it has none. Raises ApiError."""


class Webhook:
    """Serves until closed. ``leads``: returns whether this process may write now. ``installation``: its rules
    for runs. ``fetch_profile``: reads the profile of a namespace, None if nobody does."""

    def __init__(
        self,
        settings: WebhookSettings,
        store: CertificateStore,
        *,
        leads: Callable[[], bool],
        installation: Installation = NOTHING_ALLOWED,
        fetch_profile: FetchProfile | None = None,
    ) -> None:
        self._settings = settings
        self._fetch_profile = fetch_profile
        self._installation = installation
        self._store = store
        self._leads = leads
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._served: tuple[bytes, bytes] | None = None
        self._runner: web.AppRunner | None = None
        self._bodies = Bodies()
        self._connections = Connections(self._context)
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self._large = asyncio.Lock()
        self._fault = ""
        self.port = 0
        self.on_review: Callable[[bool], None] = lambda is_allowed: None

    async def run(self) -> None:
        """Serve as soon as there is a certificate, and keep it fresh. Never ends by itself."""
        while True:
            try:
                await self.look()
                self._log_fault("")
            except (ApiError, LeaseLostError, OSError, ssl.SSLError) as error:
                self._log_fault(str(error) or type(error).__name__)
            except Exception:
                # A Secret that others can write may hold anything. Runs go on without a webhook.
                log.exception(
                    "the webhook's certificate: a defect of the operator; please report it"
                )
            await asyncio.sleep(_LOOK_SECONDS if self._served else _FIRST_LOOKS_SECONDS)

    async def look(self) -> None:
        """Serve the certificate as it is now. The holder of the lease also renews and registers it."""
        if self._settings.files:
            # Another program keeps the files, and writes one before the other.
            folder = Path(self._settings.files)
            certificate = folder / "tls.crt"
            key = folder / "tls.key"
            if not (certificate.exists() and key.exists()):
                raise OSError(f"{folder} has no tls.crt and tls.key yet")
            await self._serve(certificate.read_bytes(), key.read_bytes())
            return

        # Its import takes 12 MiB, which an operator without a webhook does not need.
        from evergrad_operator.edge.webhook import certificates

        settings = self._settings
        raw = await self._store.get(SECRET, settings.namespace, settings.secret)
        bundle: Bundle | None = None
        if raw is not None:
            bundle = certificates.read_bundle(raw.get("data") or {})

        # A new process answers with the certificate of the one before: neither a renewal nor a registration
        # that fails may keep it from that.
        if bundle is not None and self._served is None:
            with contextlib.suppress(ssl.SSLError):
                await self._serve(bundle.certificate, bundle.key)

        # Only the holder of the lease writes; the other replicas serve the certificate that it has made. A
        # new one is served last: before its authority is registered, the API server trusts only the old one.
        if self._leads():
            bundle = await self._renew(raw, bundle)
        if bundle is not None:
            await self._serve(bundle.certificate, bundle.key)

    async def close(self) -> None:
        """Stop serving."""
        await self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- the certificate -----------------------------------------------------------------------------------

    async def _renew(self, raw: Raw | None, bundle: "Bundle | None") -> "Bundle | None":
        """Renew the certificate in time, register its authority, and return it.

        ``raw``: the Secret as it was read, if there is one. A quicker writer causes 409, and its Secret is
        read at the next look.
        """
        from evergrad_operator.edge.webhook import certificates

        settings = self._settings
        new = certificates.renew(bundle, settings.names, now=certificates.utc_now())
        if new is not None:
            body: dict[str, Any] = {
                "apiVersion": SECRET.version,
                "kind": SECRET.kind,
                "metadata": {
                    "name": settings.secret,
                    "namespace": settings.namespace,
                    "labels": {LABEL_MANAGED_BY: MANAGED_BY},
                },
                "type": "Opaque",
                "data": certificates.write_bundle(new),
            }
            if raw is None:
                await self._store.create(body, is_brief=True)
            else:
                # The version that was read travels along, so that the API server compares it. The type,
                # which is immutable, stays: cert-manager leaves a Secret of kubernetes.io/tls.
                body["metadata"] |= raw["metadata"]
                body["metadata"].pop("managedFields", None)
                body["type"] = raw.get("type") or body["type"]
                await self._store.replace(body)
            name = f"{settings.namespace}/{settings.secret}"
            log.info("made the webhook's certificate, Secret %s", name)

        # Registered at each look, not only after a renewal: an earlier try may have failed.
        # Only that one field is applied: the chart's others are not touched, and Helm leaves it alone.
        kept = new or bundle
        if kept is None:
            return None
        wanted = base64.b64encode(kept.authority).decode()
        for kind in (WEBHOOK, EARLY_WEBHOOK) if settings.is_early else (WEBHOOK,):
            configuration = await self._store.get(kind, "", settings.configuration)
            if configuration is None:
                missing = f"there is no {kind.kind} {settings.configuration}"
                raise OSError(f"{missing}; the chart makes it with webhook.enabled")
            hooks = configuration.get("webhooks") or ()
            ours = [one for one in hooks if one.get("name") == WEBHOOK_NAME]
            client = (ours[0].get("clientConfig") if ours else None) or {}
            # Nothing is written where nothing differs: this is looked at every minute.
            if client.get("caBundle") != wanted:
                body = {
                    "apiVersion": kind.version,
                    "kind": kind.kind,
                    "metadata": {"name": settings.configuration},
                    "webhooks": [
                        {"name": WEBHOOK_NAME, "clientConfig": {"caBundle": wanted}}
                    ],
                }
                await self._store.apply(body, manager=FIELD_MANAGER, is_brief=True)
        return kept

    # ---- the server ----------------------------------------------------------------------------------------

    async def _serve(self, certificate: bytes, key: bytes) -> None:
        """Serve this certificate from now on; listen if that has not begun. Raises SSLError and OSError."""
        # Loaded before the port is open: a connection without a certificate would only fail.
        if (certificate, key) != self._served:
            # OpenSSL reads a certificate only from files.
            with tempfile.TemporaryDirectory(prefix="evergrad-webhook-") as scratch:
                chain = Path(scratch) / "tls.crt"
                private = Path(scratch) / "tls.key"
                private.touch(mode=0o600)
                chain.write_bytes(certificate)
                private.write_bytes(key)
                # A context that refuses a pair, as when both files are just being replaced, has already
                # dropped the one before: a scratch context tries first, so that the old pair is still served.
                for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._context):
                    context.load_cert_chain(chain, private)
            self._served = certificate, key
        if self._runner is not None:
            return

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post(PATH, self._answer)
        app.on_response_prepare.append(end_after_answer)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            auto_decompress=False,
        )
        listener = open_listener(self._settings.host, self._settings.port)
        await runner.setup()
        self.port = listener.getsockname()[1]
        self._connections.start(cast("web.Server", runner.server), listener)
        self._runner = runner
        log.info("serving the validating webhook on port %d", self.port)

    async def _answer(self, request: web.Request) -> web.Response:
        async with self._bodies.read(request) as body:
            is_large = len(body) > _LARGE_BYTES
            # Only what is being checked is held as objects: they take far more than the body.
            with self._connections.busy(request.protocol):
                async with (
                    self._large if is_large else contextlib.nullcontext(),
                    self._slots,
                ):
                    return await self._check(body)

    async def _check(self, body: bytes) -> web.Response:
        try:
            raw = json.loads(body)
        except ValueError:
            raw = None
        except RecursionError:
            # An answer without the object still names the mistake; without an answer the API server would
            # report a webhook that fails.
            uid = _UID.search(body[:_START_BYTES])
            self.on_review(False)
            found = "" if uid is None else uid[1].decode()
            return web.json_response(deny_depth(found))
        if not isinstance(raw, dict) or not isinstance(raw.get("request"), dict):
            return web.Response(status=400, text="the body is no AdmissionReview\n")

        if has_too_many_values(raw["request"]):
            answer = deny_size(raw)
        else:
            # A thread has less room for recursion than this one: nothing deep goes there.
            for key in ("object", "oldObject"):
                raw["request"][key] = cut_deep(raw["request"].get(key))
            # Validation takes milliseconds of processor. It runs in threads, a few at a time, or the event
            # loop would wait for it.
            own = await self._find_profile(raw["request"])
            answer = await asyncio.to_thread(review, raw, self._installation, own)
        self.on_review(answer["response"]["allowed"])
        return web.json_response(answer)

    async def _find_profile(self, request: Mapping[str, Any]) -> NamespaceProfile | None:
        """Return the profile of the namespace of a request; None if it has none or cannot be read now.

        The operator checks the run again, with the profile, before it makes a pod.
        """
        namespace = str(request.get("namespace") or "")
        if self._fetch_profile is None or not namespace:
            return None
        try:
            async with asyncio.timeout(_PROFILE_SECONDS):
                return await self._fetch_profile(namespace)
        except (ApiError, OSError, TimeoutError) as error:
            log.warning(
                "the profile of namespace %s could not be read: %s", namespace, error
            )
            return None

    def _log_fault(self, text: str) -> None:
        """Log a fault, or its end, once: every look, each minute, reports it."""
        if text and text != self._fault:
            log.warning("the webhook is not as it should be: %s", text)
        elif self._fault and not text:
            log.info("the webhook is as it should be again")
        self._fault = text

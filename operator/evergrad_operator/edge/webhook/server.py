"""The validating webhook: a server with its own port, and the certificate that the API server trusts.

The webhook may be registered twice. The validating webhook makes the final decision. The API server calls the
mutating webhook, which never changes an object, before it checks types and bounds itself. Therefore all
problems of a file are reported together, with the same texts as ``evergrad validate``.

Every replica serves the webhook, including a replica that waits for the lease, because a review writes
nothing. Only the holder of the lease creates the certificate and registers its authority with the API server.
A failure of the webhook does not end the operator, because the operator also checks each run before its first
pod.
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
"""Name of the only webhook in the chart's configuration."""
FIELD_MANAGER: Final = "evergrad-webhook"
_UID: Final = re.compile(rb'"request":\s*\{\s*"uid":\s*"([0-9A-Za-z-]+)"')
_START_BYTES: Final = 4096
"""Length of the part of a request that contains the uid. The API server writes it before any user text."""
_AT_A_TIME: Final = 4
"""Maximum number of concurrent checks in threads, so that large files do not delay the operator's work."""
_LARGE_BYTES: Final = 2**15
"""Size in bytes above which requests are checked one at a time.

As parsed JSON, a request takes at least 40 times its size.
"""
_LOOK_SECONDS: Final = 60.0
"""Seconds between two reads of the certificate, which another replica or cert-manager may have renewed."""
_PROFILE_SECONDS: Final = 3.0
"""Maximum seconds for reading the profile of a namespace. The API server waits 10 s for the answer."""
_FIRST_LOOKS_SECONDS: Final = 2.0
"""Seconds between two reads while there is no certificate, which the holder of the lease creates."""


@dataclass(frozen=True)
class WebhookSettings:
    """Address of the webhook's server, and the names of its objects.

    ``files``: a folder with tls.crt and tls.key that another program, such as cert-manager, manages.
    ``is_early``: whether the webhook is also registered as a mutating webhook.
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
        """DNS names of the certificate. The API server uses the first name."""
        return (
            f"{self.service}.{self.namespace}.svc",
            f"{self.service}.{self.namespace}.svc.cluster.local",
        )


class CertificateStore(Protocol):
    """The requests to the API server that the webhook needs. ``Kube`` implements it. All raise ApiError."""

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
        """Replace the whole object, unless it was changed since it was read."""

    async def apply(
        self,
        body: Raw,
        *,
        subresource: str = "",
        manager: str = "",
        is_brief: bool = False,
    ) -> Raw:
        """Apply the complete intent of ``manager`` by server-side apply."""


FetchProfile = Callable[[str], Awaitable[NamespaceProfile | None]]
"""Returns the profile of a namespace, or None. Raises ApiError."""


class Webhook:
    """Serves the webhook until it is closed.

    ``leads`` returns whether this process holds the lease. ``installation``: the installation's rules for
    runs. ``fetch_profile`` reads the profile of a namespace; if it is None, profiles are not checked.
    """

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
        """Serve when there is a certificate, and keep the certificate up to date. Never returns."""
        while True:
            try:
                await self.look()
                self._log_fault("")
            except (ApiError, LeaseLostError, OSError, ssl.SSLError) as error:
                self._log_fault(str(error) or type(error).__name__)
            except Exception:
                # The Secret may have any content, because others can write it. Log the error and continue,
                # because runs do not need the webhook.
                log.exception(
                    "the webhook's certificate: a defect of the operator; please report it"
                )
            await asyncio.sleep(_LOOK_SECONDS if self._served else _FIRST_LOOKS_SECONDS)

    async def look(self) -> None:
        """Read and serve the current certificate. The holder of the lease also renews and registers it.

        Raises ApiError, LeaseLostError, OSError or ssl.SSLError.
        """
        if self._settings.files:
            # Another program manages the files and may not have written both yet.
            folder = Path(self._settings.files)
            certificate = folder / "tls.crt"
            key = folder / "tls.key"
            if not (certificate.exists() and key.exists()):
                raise OSError(f"{folder} has no tls.crt and tls.key yet")
            await self._serve(certificate.read_bytes(), key.read_bytes())
            return

        # Import it here, because it takes 12 MiB, which an operator without a webhook does not need.
        from evergrad_operator.edge.webhook import certificates

        settings = self._settings
        raw = await self._store.get(SECRET, settings.namespace, settings.secret)
        bundle: Bundle | None = None
        if raw is not None:
            bundle = certificates.read_bundle(raw.get("data") or {})

        # After a restart, serve the existing certificate first, so that a failed renewal or registration
        # does not prevent the process from serving.
        if bundle is not None and self._served is None:
            with contextlib.suppress(ssl.SSLError):
                await self._serve(bundle.certificate, bundle.key)

        # Only the holder of the lease writes; the other replicas serve its certificate. Serve a new
        # certificate last, because the API server trusts it only after its authority is registered.
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
        """Renew the certificate if it is due, register its authority, and return the current bundle.

        ``raw``: the Secret as it was read, or None. If another writer was faster, the API server returns 409
        and its Secret is used at the next ``look``.
        """
        from evergrad_operator.edge.webhook import certificates

        new = certificates.renew(bundle, self._settings.names, now=certificates.utc_now())
        if new is not None:
            await self._store_bundle(raw, certificates.write_bundle(new))
        # Register at each look, not only after a renewal, because an earlier registration may have failed.
        kept = new or bundle
        if kept is not None:
            await self._register(kept.authority)
        return kept

    async def _store_bundle(self, raw: Raw | None, data: Mapping[str, str]) -> None:
        """Write the certificate's Secret. ``raw``: the Secret as it was read, or None."""
        settings = self._settings
        body: dict[str, Any] = {
            "apiVersion": SECRET.version,
            "kind": SECRET.kind,
            "metadata": {
                "name": settings.secret,
                "namespace": settings.namespace,
                "labels": {LABEL_MANAGED_BY: MANAGED_BY},
            },
            "type": "Opaque",
            "data": data,
        }
        if raw is None:
            await self._store.create(body, is_brief=True)
        else:
            # Send the resource version that was read, so that the API server compares it. Keep the type,
            # which is immutable: a Secret of cert-manager has the type kubernetes.io/tls.
            body["metadata"] |= raw["metadata"]
            body["metadata"].pop("managedFields", None)
            body["type"] = raw.get("type") or body["type"]
            await self._store.replace(body)
        name = f"{settings.namespace}/{settings.secret}"
        log.info("made the webhook's certificate, Secret %s", name)

    async def _register(self, authority: bytes) -> None:
        """Register the authority in the webhook's configurations.

        Only this one field is applied: the chart's other fields stay unchanged, and Helm does not reset it.
        """
        settings = self._settings
        wanted = base64.b64encode(authority).decode()
        for kind in (WEBHOOK, EARLY_WEBHOOK) if settings.is_early else (WEBHOOK,):
            configuration = await self._store.get(kind, "", settings.configuration)
            if configuration is None:
                missing = f"there is no {kind.kind} {settings.configuration}"
                raise OSError(f"{missing}; the chart makes it with webhook.enabled")
            hooks = configuration.get("webhooks") or ()
            ours = [one for one in hooks if one.get("name") == WEBHOOK_NAME]
            client = (ours[0].get("clientConfig") if ours else None) or {}
            # Write only if the value differs, because this check runs every minute.
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

    # ---- the server ----------------------------------------------------------------------------------------

    async def _serve(self, certificate: bytes, key: bytes) -> None:
        """Use this certificate from now on, and start to listen at the first call.

        Raises ssl.SSLError or OSError.
        """
        # Load the certificate before the port is open, because connections without a certificate would fail.
        if (certificate, key) != self._served:
            # Write temporary files, because OpenSSL reads a certificate only from files.
            with tempfile.TemporaryDirectory(prefix="evergrad-webhook-") as scratch:
                chain = Path(scratch) / "tls.crt"
                private = Path(scratch) / "tls.key"
                private.touch(mode=0o600)
                chain.write_bytes(certificate)
                private.write_bytes(key)
                # If a context refuses a pair, for example because the two files are just being replaced, it
                # has already dropped the old pair. Try the pair with a temporary context first, so that the
                # old pair is still served.
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
            # Parse the body only when its check starts, because the objects take far more memory.
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
            # Answer without the parsed object. Without an answer, the API server would report a failing
            # webhook instead of the problem.
            uid = _UID.search(body[:_START_BYTES])
            self.on_review(False)
            found = "" if uid is None else uid[1].decode()
            return web.json_response(deny_depth(found))
        if not isinstance(raw, dict) or not isinstance(raw.get("request"), dict):
            return web.Response(status=400, text="the body is not an AdmissionReview\n")

        if has_too_many_values(raw["request"]):
            answer = deny_size(raw)
        else:
            # Cut deeply nested values, because a thread has a smaller stack than the main thread.
            for key in ("object", "oldObject"):
                raw["request"][key] = cut_deep(raw["request"].get(key))
            # Validation takes milliseconds of CPU time. Run it in a few threads, so that it does not block
            # the event loop.
            own = await self._find_profile(raw["request"])
            answer = await asyncio.to_thread(review, raw, self._installation, own)
        self.on_review(answer["response"]["allowed"])
        return web.json_response(answer)

    async def _find_profile(self, request: Mapping[str, Any]) -> NamespaceProfile | None:
        """Return the profile of the request's namespace, or None if there is none or it cannot be read.

        The operator checks the run again with the profile before it creates a pod.
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
        """Log a fault and its end once each, because ``look`` reports the fault every minute."""
        if text and text != self._fault:
            log.warning("the webhook is not set up: %s", text)
        elif self._fault and not text:
            log.info("the webhook is set up again")
        self._fault = text

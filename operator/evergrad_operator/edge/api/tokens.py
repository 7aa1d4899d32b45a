"""Derives the tokens of runs, and loads the installation's key.

A run's token is HMAC-SHA256(key, uid of the run). A restarted operator can therefore derive every token
without reading the Secrets of runs, for which it has no permission.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from typing import Final, Protocol

from evergrad_operator.core.objects.errors import ApiError, SettingsError
from evergrad_operator.core.objects.kinds import SECRET, Kind, Raw
from evergrad_operator.core.objects.names import LABEL_MANAGED_BY, MANAGED_BY

log = logging.getLogger(__name__)
KEY_BYTES: Final = 32
_FIELD: Final = "key"
_TRIES: Final = 3
"""Maximum number of tries.

Between a read and a write, another operator may create the key or a user may delete it. If this happens more
often, it is not a race.
"""


class KeyStore(Protocol):
    """The requests to the API server that the key needs. ``Kube`` implements it. All raise ApiError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """Return the object, or None."""

    async def create(
        self,
        body: Raw,
        *,
        is_fenced: bool = True,
        is_brief: bool = False,
    ) -> Raw:
        """Create an object. Raises ApiError with status 409 if an object of this name exists."""


def derive_token(key: bytes, uid: str) -> str:
    """Return the token of the run with this uid: 64 hex digits."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()


async def load_key(store: KeyStore, namespace: str, name: str) -> bytes:
    """Return the installation's key from its Secret. If the Secret does not exist, it is created.

    Replicas that start together use the same key, because the first created Secret counts. Raises
    SettingsError if the Secret has no valid key or access is forbidden, otherwise ApiError.
    """
    # Two writers may race. The writer that is refused with 409 reads the key of the other one.
    for _ in range(_TRIES):
        try:
            raw = await store.get(SECRET, namespace, name)
            if raw is not None:
                return _read_key(raw, namespace, name)
            await store.create(_build_secret(namespace, name), is_brief=True)
            log.info("made the installation's key, Secret %s/%s", namespace, name)
        except ApiError as error:
            if error.status == 403:
                text = (
                    f"it may not be read or created; {error.message}. Install the chart's roles for "
                    "this namespace."
                )
                raise SettingsError(f"Secret {namespace}/{name}: {text}") from error
            if error.status != 409:
                raise
    raise SettingsError(
        f"Secret {namespace}/{name}: it can neither be read nor created; something deletes it "
        "repeatedly. Find and stop what deletes it."
    )


def _read_key(raw: Raw, namespace: str, name: str) -> bytes:
    """Return the key in the Secret. Raises SettingsError if it has no valid key."""
    try:
        text = (raw.get("data") or {}).get(_FIELD) or ""
        known = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        known = b""
    # Refuse a short key, because every token of the installation is derived from it.
    if len(known) < KEY_BYTES:
        raise SettingsError(
            f"Secret {namespace}/{name}: it has no {_FIELD!r} of at least {KEY_BYTES} bytes, "
            "from which the tokens of runs are derived. Delete it, so that the operator makes "
            "one; runs at work then need a new spec.restartNonce."
        )
    return known


def _build_secret(namespace: str, name: str) -> Raw:
    """Build the Secret with a new key.

    It has no owner, so that it survives a reinstallation of the operator. The tokens of running runs are
    derived from it.
    """
    key = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
    return {
        "apiVersion": SECRET.version,
        "kind": SECRET.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {LABEL_MANAGED_BY: MANAGED_BY},
        },
        "type": "Opaque",
        "immutable": True,
        "data": {_FIELD: key},
    }

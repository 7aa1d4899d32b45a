"""A gate before all writes: only the holder of one Lease may write, and only for as long as nobody else can
have taken it.

The holder counts from before its last renewal was sent; a candidate takes over only after it has itself seen
the lease unchanged for the whole duration. No clock is compared with another machine's. A process that was
stopped meanwhile finds its time run out.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from evergrad_operator.errors import ApiError, LeaseLostError
from evergrad_operator.kinds import LEASE, Raw
from evergrad_operator.kube import Kube

log = logging.getLogger(__name__)
MARGIN_SECONDS: Final = 1.0


def monotonic() -> float:
    """Seconds that go on while the process, or the machine, is stopped."""
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME)
        if hasattr(time, "CLOCK_BOOTTIME")
        else time.monotonic()
    )


@dataclass(frozen=True)
class LeaseSettings:
    """Which lease, who asks for it, and for how many seconds a renewal is good.

    Renewed every third of that.
    """

    namespace: str
    name: str
    identity: str
    seconds: float = 15.0


class LeaseGate:
    """Held or not. ``remaining`` is what every write asks."""

    def __init__(
        self, settings: LeaseSettings, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._held_until = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)
        self.on_change: Callable[[bool], None] = lambda is_held: None

    def remaining(self) -> float:
        """Seconds for which this process holds the lease for sure; none or fewer: not at all."""
        return self._held_until - self._clock()

    async def acquire(self, kube: Kube) -> None:
        """Wait until the lease is ours."""
        told = False
        # Eight looks in the time of a lease: a successor is found soon after it ends.
        while not await self._try(kube):
            if not told:
                log.info(
                    "waiting for the lease %s/%s", self._settings.namespace, self._settings.name
                )
                told = True
            await asyncio.sleep(self._settings.seconds / 8)
        log.info(
            "holding the lease %s/%s as %s",
            self._settings.namespace,
            self._settings.name,
            self._settings.identity,
        )
        self.on_change(True)

    async def keep(self, kube: Kube) -> None:
        """Renew until that fails for too long. Raises LeaseLostError then."""
        while True:
            await asyncio.sleep(max(0.0, min(self._settings.seconds / 3, self.remaining())))
            # A renewal that fails is tried again while the lease still holds: two thirds of its time are
            # for that.
            if self.remaining() <= 0 or not await self._try(kube):
                if self.remaining() > 0:
                    await asyncio.sleep(self._settings.seconds / 15)
                    continue
                self._held_until = float("-inf")
                self.on_change(False)
                raise LeaseLostError

    async def release(self, kube: Kube) -> None:
        """Give it back, so that the next one need not wait. Nothing may be written afterwards."""
        # First nothing may be written any more, then others may know of it.
        is_held, self._held_until = self.remaining() > 0, float("-inf")
        self.on_change(False)
        if not is_held:
            return
        try:
            raw = await kube.get(LEASE, self._settings.namespace, self._settings.name)
            if (
                raw is not None
                and (raw.get("spec") or {}).get("holderIdentity") == self._settings.identity
            ):
                spec = {**raw["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await kube.replace({**raw, "spec": spec}, is_fenced=False)
        except ApiError as error:
            log.info("the lease was not given back: %s", error)

    async def _try(self, kube: Kube) -> bool:
        """Take or renew it; whether that worked. What the API server does not answer counts as not."""
        try:
            async with asyncio.timeout(self._settings.seconds / 2):
                return await self._take(kube)
        except (ApiError, TimeoutError) as error:
            if not isinstance(error, ApiError) or error.status not in (409,):
                log.warning("the lease could not be taken or renewed: %s", error)
            return False

    async def _take(self, kube: Kube) -> bool:
        raw = await kube.get(LEASE, self._settings.namespace, self._settings.name)
        # Time counts from before the write is sent: others count from when they see it.
        asked = self._clock()
        if raw is None:
            await kube.create(self._build(None), is_fenced=False)
        else:
            # Another's lease is stale once it has not been renewed for its whole duration, as seen from here:
            # its own times are of another clock.
            spec, now = raw.get("spec") or {}, self._clock()
            version = str(raw["metadata"].get("resourceVersion", ""))
            if self._seen[0] != version:
                self._seen = version, now
            duration = float(spec.get("leaseDurationSeconds") or self._settings.seconds)
            is_stale = now - self._seen[1] > duration
            holder = spec.get("holderIdentity") or ""
            if holder and holder != self._settings.identity and not is_stale:
                self._held_until = float("-inf")
                return False
            # Replaced only if nobody was quicker: the version is the one that was looked at.
            await kube.replace(self._build(raw), is_fenced=False)
        self._held_until = asked + self._settings.seconds - MARGIN_SECONDS
        return True

    def _build(self, raw: Raw | None) -> Raw:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: Raw = (raw or {}).get("spec") or {}
        is_ours = old.get("holderIdentity") == self._settings.identity
        spec: dict[str, Any] = {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": max(1, round(self._settings.seconds)),
            "acquireTime": old.get("acquireTime") if is_ours else now,
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0)
            + (raw is not None and not is_ours),
        }
        metadata = (raw or {}).get("metadata") or {
            "name": self._settings.name,
            "namespace": self._settings.namespace,
        }
        kept = {key: value for key, value in metadata.items() if key != "managedFields"}
        return {"apiVersion": LEASE.version, "kind": LEASE.kind, "metadata": kept, "spec": spec}

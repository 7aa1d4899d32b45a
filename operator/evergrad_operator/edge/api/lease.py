"""A gate before all writes: only the holder of one Lease may write, and only for as long as nobody else can
have taken it.

The holder counts from before its last renewal was sent; a candidate takes over only after it has itself seen
the lease unchanged for the whole duration. No clock is compared with another machine's. A process that was
stopped meanwhile finds its time run out.

State of a process   event                                         next state
waiting              the lease was written with our identity       holding
holding              a renewal was written in time                 holding
holding              no renewal was written while the time lasted  waiting
holding              the lease has another holder                  waiting
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import LEASE, Raw
from evergrad_operator.edge.api.kube import Kube

log = logging.getLogger(__name__)
MARGIN_SECONDS: Final = 1.0
"""Time by which the holder stops writing before the lease can be taken: a request may still be on its way."""


def monotonic() -> float:
    """Return seconds that go on while the process, or the machine, is stopped."""
    # CLOCK_MONOTONIC stands still while a machine sleeps, and a lease would seem held after it.
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@dataclass(frozen=True)
class LeaseSettings:
    """The lease, the identity that asks for it, and the seconds for which a renewal is good.

    It is renewed every third of that time.
    """

    namespace: str
    name: str
    identity: str
    seconds: float = 15.0


class LeaseGate:
    """One lease, held or not. Every write asks ``remaining``."""

    def __init__(
        self, settings: LeaseSettings, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._held_until = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)
        self._is_failing = False
        """Whether the last request about the lease failed: an outage is logged once, and so is its end."""
        self.has_other_holder = False
        """Whether the lease had another holder when it was last read."""
        self.on_change: Callable[[bool], None] = lambda is_held: None

    def remaining(self) -> float:
        """Return the seconds for which this process surely holds the lease; 0 or less: it does not."""
        return self._held_until - self._clock()

    async def acquire(self, kube: Kube) -> None:
        """Wait until this process holds the lease."""
        # Eight tries in the time of a lease: one that has ended is taken soon.
        is_logged = False
        while not await self._try(kube):
            if not is_logged:
                log.info(
                    "waiting for the lease %s/%s",
                    self._settings.namespace,
                    self._settings.name,
                )
                is_logged = True
            await asyncio.sleep(self._settings.seconds / 8)
        log.info(
            "holding the lease %s/%s as %s",
            self._settings.namespace,
            self._settings.name,
            self._settings.identity,
        )
        self.on_change(True)

    async def keep(self, kube: Kube) -> None:
        """Renew the lease, and return once this process does not hold it any more."""
        while True:
            # A renewal that fails is tried again while the lease still holds: two thirds of its time are
            # left for that.
            pause = min(self._settings.seconds / 3, self.remaining())
            await asyncio.sleep(max(0.0, pause))
            if self.remaining() > 0 and await self._try(kube, is_renewal=True):
                continue
            if self.remaining() > 0:
                await asyncio.sleep(self._settings.seconds / 15)
                continue

            self._held_until = float("-inf")
            self.on_change(False)
            log.warning(
                "the lease %s/%s is lost: nothing is written until this process holds it again",
                self._settings.namespace,
                self._settings.name,
            )
            return

    async def release(self, kube: Kube) -> None:
        """Give the lease back, so that the next holder need not wait. Nothing may be written afterwards."""
        # Writes are stopped first: the next holder may begin as soon as it sees the lease without one.
        is_held = self.remaining() > 0
        self._held_until = float("-inf")
        self.on_change(False)
        if not is_held:
            return
        try:
            raw = await kube.get(
                LEASE,
                self._settings.namespace,
                self._settings.name,
            )
            if raw is None:
                return
            spec = raw.get("spec") or {}
            if spec.get("holderIdentity") == self._settings.identity:
                free = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
                await kube.replace({**raw, "spec": free}, is_fenced=False)
        except ApiError as error:
            log.info("the lease was not given back: %s", error)

    async def _try(self, kube: Kube, *, is_renewal: bool = False) -> bool:
        """Take or renew the lease, and return whether that worked. A request without an answer did not.

        ``is_renewal``: only if this process has held the lease all the time.
        """
        try:
            async with asyncio.timeout(self._settings.seconds / 2):
                raw = await kube.get(LEASE, self._settings.namespace, self._settings.name)

                # Time counts from before the write is sent: others count from when they see it.
                asked = self._clock()
                # A process that was stopped may find the lease free although another has held it meanwhile:
                # to take it then is no renewal, and needs a fresh look at the cluster.
                if is_renewal and self.remaining() <= 0:
                    return False
                if raw is None:
                    await kube.create(self._build(None), is_fenced=False)
                else:
                    # Another's lease is stale once it has not been renewed for its whole duration, as seen
                    # from here: its own times are of another clock.
                    spec = raw.get("spec") or {}
                    version = str(raw["metadata"].get("resourceVersion", ""))
                    if self._seen[0] != version:
                        self._seen = version, asked
                    duration = float(
                        spec.get("leaseDurationSeconds") or self._settings.seconds
                    )
                    is_stale = asked - self._seen[1] > duration
                    holder = spec.get("holderIdentity") or ""
                    is_free = not holder or holder == self._settings.identity
                    self.has_other_holder = not is_free
                    if not is_free and not is_stale:
                        self._held_until = float("-inf")
                        self._is_failing = False
                        return False

                    # Replaced only if nobody was quicker: the version is the one that was looked at.
                    await kube.replace(self._build(raw), is_fenced=False)
        except (ApiError, TimeoutError) as error:
            # A conflict is the ordinary answer to the slower of two candidates.
            if isinstance(error, ApiError) and error.status == 409:
                return False
            if not self._is_failing:
                text = str(error) or "no answer in time"
                log.warning(
                    "the lease could not be taken or renewed, and is tried again: %s", text
                )
            self._is_failing = True
            return False
        self._held_until = asked + self._settings.seconds - MARGIN_SECONDS
        self.has_other_holder = False
        self._is_failing = False
        return True

    def _build(self, raw: Raw | None) -> Raw:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: Raw = (raw or {}).get("spec") or {}
        is_ours = old.get("holderIdentity") == self._settings.identity
        transitions = int(old.get("leaseTransitions") or 0)
        # A lease that is made anew has had no other holder.
        if raw is not None and not is_ours:
            transitions += 1
        spec: dict[str, Any] = {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": max(1, round(self._settings.seconds)),
            "acquireTime": old.get("acquireTime") if is_ours else now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        metadata = {
            "name": self._settings.name,
            "namespace": self._settings.namespace,
        }
        if raw is not None:
            # With the version that was read: the API server then refuses the slower of two writers.
            metadata = raw["metadata"]
        # Managed fields are large and the API server's own: sent back, they would have to be right.
        kept = {key: value for key, value in metadata.items() if key != "managedFields"}
        return {
            "apiVersion": LEASE.version,
            "kind": LEASE.kind,
            "metadata": kept,
            "spec": spec,
        }

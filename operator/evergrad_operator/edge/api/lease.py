"""A gate for all writes: only the holder of a Lease may write, and only while no other process can have it.

The holder counts the time from before its last renewal was sent. A candidate takes over only after it has
itself observed an unchanged lease for the whole duration. Clocks of different machines are never compared. If
a process was stopped in between, its time has run out when it continues.

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
"""Seconds before the end of the lease at which the holder stops writing, because a request takes time."""


def monotonic() -> float:
    """Return the seconds of a clock that also advances while the process or the machine is suspended."""
    # CLOCK_MONOTONIC does not advance while a machine is suspended, and a lease would seem held afterwards.
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@dataclass(frozen=True)
class LeaseSettings:
    """The lease, the identity of this process, and the seconds for which a renewal is valid.

    The lease is renewed at every third of this time.
    """

    namespace: str
    name: str
    identity: str
    seconds: float = 15.0


class LeaseGate:
    """The lease of this process. ``remaining`` is checked before every write."""

    def __init__(
        self, settings: LeaseSettings, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._held_until = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)
        self._is_failing = False
        """Whether the last request for the lease failed, so that an outage is logged only once."""
        self.has_other_holder = False
        """Whether the lease had another holder when it was last read."""
        self.on_change: Callable[[bool], None] = lambda is_held: None

    def remaining(self) -> float:
        """Return the seconds for which this process certainly holds the lease; 0 or less if it does not."""
        return self._held_until - self._clock()

    async def acquire(self, kube: Kube) -> None:
        """Wait until this process holds the lease."""
        # Try eight times in the duration of a lease, so that a free lease is taken within that fraction.
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
        """Renew the lease, and return when this process no longer holds it."""
        while True:
            # Retry a failed renewal while the lease is still held: two thirds of its time are left.
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
        """Release the lease, so that the next holder does not have to wait. It ends all writes."""
        # Stop writes first, because the next holder may start as soon as it reads the released lease.
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
            log.info("the lease was not released: %s", error)

    async def _try(self, kube: Kube, *, is_renewal: bool = False) -> bool:
        """Take or renew the lease, and return whether this succeeded. A missing answer counts as a failure.

        ``is_renewal``: fail if this process has not held the lease all the time.
        """
        try:
            async with asyncio.timeout(self._settings.seconds / 2):
                raw = await kube.get(LEASE, self._settings.namespace, self._settings.name)

                # Count the time from before the write is sent. Other processes count from when they read it.
                asked = self._clock()
                # If this process was suspended, another process may have held the lease in between. Taking it
                # now would not be a renewal: the cluster must be listed again first.
                if is_renewal and self.remaining() <= 0:
                    return False
                if raw is None:
                    await kube.create(self._build(None), is_fenced=False)
                else:
                    if self._is_held_by_other(raw, asked):
                        self._held_until = float("-inf")
                        self._is_failing = False
                        return False

                    # The replacement contains the version that was read, so it fails if another process was
                    # faster.
                    await kube.replace(self._build(raw), is_fenced=False)
        except (ApiError, TimeoutError) as error:
            # The slower of two candidates gets a conflict. This is normal and not logged.
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

    def _is_held_by_other(self, raw: Raw, asked: float) -> bool:
        """Return whether another process holds this lease, and renews it in time."""
        # The lease of another holder is stale if this process has observed no renewal for its whole duration.
        # The times in the lease are of another clock.
        spec = raw.get("spec") or {}
        version = str(raw["metadata"].get("resourceVersion", ""))
        if self._seen[0] != version:
            self._seen = version, asked
        duration = float(spec.get("leaseDurationSeconds") or self._settings.seconds)
        is_stale = asked - self._seen[1] > duration
        holder = spec.get("holderIdentity") or ""
        is_free = not holder or holder == self._settings.identity
        self.has_other_holder = not is_free
        return not is_free and not is_stale

    def _build(self, raw: Raw | None) -> Raw:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: Raw = (raw or {}).get("spec") or {}
        is_ours = old.get("holderIdentity") == self._settings.identity
        transitions = int(old.get("leaseTransitions") or 0)
        # A newly created lease has had no other holder.
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
            # Keep the version that was read, so that the API server refuses the slower of two writers.
            metadata = raw["metadata"]
        # Remove the managed fields. They are large, and the API server would validate them.
        kept = {key: value for key, value in metadata.items() if key != "managedFields"}
        return {
            "apiVersion": LEASE.version,
            "kind": LEASE.kind,
            "metadata": kept,
            "spec": spec,
        }

"""The running operator: what is built of what, what runs beside what, and the end.

All wiring, no decision.
"""

import asyncio
import contextlib
import gc
import logging
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

import kopf

from evergrad_operator.connection import Connection, connect
from evergrad_operator.errors import ApiError, LeaseLostError, SettingsError
from evergrad_operator.facts import count_phases, read_runs
from evergrad_operator.handlers import build_registry, build_settings, check_kopf, describe_kopf
from evergrad_operator.health import HealthServer
from evergrad_operator.kube import (
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    NETWORK_POLICY,
    POD,
    RUN,
    SECRET,
    SERVICE,
    Kind,
    Kube,
    Limits,
    OpenGate,
    Raw,
)
from evergrad_operator.lease import LeaseGate, LeaseSettings
from evergrad_operator.metrics import Facts, FactsCollector, Metrics
from evergrad_operator.mirror import CHILDREN, CLAIMS, PODS, RUNS, Mirror
from evergrad_operator.names import LABEL_RUN, Key
from evergrad_operator.progress import Coordinators, PollSettings
from evergrad_operator.queue import WorkQueue
from evergrad_operator.reconcile import Reconciler
from evergrad_operator.recorder import Recorder
from evergrad_operator.settings import Settings
from evergrad_operator.tokens import derive_token, load_key
from evergrad_operator.webhook import Webhook, WebhookSettings

log = logging.getLogger(__name__)
STALLED_SECONDS: Final = 100.0
"""So long nothing may stand still before /healthz says so."""
PRUNE_SECONDS: Final = 10.0
"""Between two looks at what vanished in gaps of watches. The objects of one list are shown over some time."""
_LATE_SECONDS: Final = 30.0
"""A watch that owes a version for so long may owe it of an object that is gone."""
_WATCHED: Final = ((RUNS, RUN, ""), (PODS, POD, LABEL_RUN), (CLAIMS, CLAIM, LABEL_RUN))
"""Resource, kind and label selector of what kopf watches."""
_SPACING = 0.1
_LAG_SECONDS = 0.25
_PROGRESS_PAUSE = 2.0


class Service:
    """One operator process."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings, self._connection = settings, connection
        self.metrics = metrics = Metrics()
        self.gate = LeaseGate(_lease_settings(settings)) if settings.lease else OpenGate()
        self.kube = self._build_kube(Limits(in_flight=settings.in_flight))
        self._lease_kube = self._build_kube(Limits(in_flight=2, request_seconds=5.0, tries=2))
        self.mirror = Mirror()
        poll = PollSettings(every=settings.poll_seconds, port=settings.coordinator_port)
        self.coordinators = Coordinators(poll, on_news=self._hear_news)
        self.coordinators.on_failure = lambda cause: metrics.poll_failures.labels(cause).inc()
        recorder = Recorder(
            self.kube, on_post=lambda action: metrics.events.labels(action).inc()
        )
        self.queue: WorkQueue[Key] = WorkQueue(spacing=_SPACING)
        self._stop, self._is_listed_anew = asyncio.Event(), asyncio.Event()
        self.reconciler = Reconciler(
            self.kube,
            mirror=self.mirror,
            coordinators=self.coordinators,
            recorder=recorder,
            config=settings.config,
            metrics=metrics,
        )
        self.reconciler.on_forget, self.reconciler.on_missing = (
            self.queue.drop,
            self._is_listed_anew.set,
        )
        self._collector = FactsCollector(self._read_facts())
        metrics.registry.register(self._collector)
        self._health = HealthServer(
            live=[self._find_stall], ready=[self._find_unready], metrics=self._gather
        )
        self._webhook = self._build_webhook() if settings.webhook else None
        self._tasks: list[asyncio.Task[Any]] = []
        self._fault: BaseException | None = None
        self._is_standing_by, self._is_synced = False, False

    async def run(self) -> int:
        """Run until asked to stop; the exit code: 0 asked to, 1 for what a new start may mend."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        port = await self._health.listen(self._settings.host, self._settings.port)
        log.info("serving /healthz, /readyz and /metrics on port %d", port)
        try:
            await self._check_access()
            self._spawn("event loop lag", self._measure_lag())
            if self._webhook is not None:
                # Before the lease: a standby answers, too.
                self._spawn("webhook", self._webhook.run())
            if await self._lead():
                await self._load_key()
                await self._serve()
        except (ApiError, LeaseLostError) as error:
            self._fault = error
        finally:
            await self._close()
        if self._fault is not None:
            log.error("ends: %s", str(self._fault) or type(self._fault).__name__)
        return 0 if self._fault is None else 1

    # ---- the parts in time ---------------------------------------------------------------------------------

    async def _check_access(self) -> None:
        """Fail at once for missing rights or a missing CRD, which would look like a hang later.

        Raises SettingsError.
        """
        needed: list[tuple[str, Kind, str]] = [
            ("list", RUN, ""),
            ("watch", RUN, ""),
            ("patch", RUN, "status"),
        ]
        needed += [(verb, POD, "") for verb in ("list", "watch", "create", "delete")]
        needed += [
            (verb, kind, "")
            for kind in (CONFIG_MAP, SERVICE, CLAIM)
            for verb in ("list", "create", "patch")
        ]
        needed += [("create", SECRET, "")]
        for scope in self._settings.scopes:
            asked = [
                self.kube.may(verb, kind, namespace=scope, subresource=sub)
                for verb, kind, sub in needed
            ]
            answers = await asyncio.gather(*asked)
            lacking = [
                f"{verb} {kind.plural}{'/' if sub else ''}{sub}"
                for (verb, kind, sub), may in zip(needed, answers, strict=True)
                if not may
            ]
            if lacking:
                where = f"namespace {scope}" if scope else "the whole cluster"
                raise SettingsError(
                    f"the operator may not {', '.join(lacking)} in {where}. Install the chart's "
                    "roles for this scope."
                )
            try:
                await self.kube.list_all(RUN, scope, metadata_only=True)
            except ApiError as error:
                if error.status == 404:
                    raise SettingsError(
                        "the API server does not know TrainingRuns. Install the chart's CRD first."
                    ) from error
                raise

    async def _lead(self) -> bool:
        """Wait until this process may write; False if it was asked to stop before."""
        gate = self.gate
        if not isinstance(gate, LeaseGate):
            self.metrics.leader.set(1)
            return not self._stop.is_set()
        gate.on_change = lambda is_held: self.metrics.leader.set(int(is_held))
        self._is_standing_by = True
        if not await self._unless_stopped(gate.acquire(self._lease_kube)):
            return False
        self._is_standing_by = False
        self._spawn("lease", gate.keep(self._lease_kube))
        return True

    async def _load_key(self) -> None:
        """Read the key that the tokens of all runs are derived from; only the one that leads makes it."""
        key = await load_key(self.kube, self._settings.key_namespace, self._settings.key_name)
        self.reconciler.token_of = partial(derive_token, key)

    async def _serve(self) -> None:
        """Fill the mirror, then work until the stop."""
        if not await self._unless_stopped(self._resync()):
            return
        log.info("%d runs, %d pods found", self.mirror.count()[RUNS], self.mirror.count()[PODS])
        for key in self.mirror.known():
            self.queue.add(key)
        # What is known stays for long: looking through it again and again costs time at every collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        self._spawn(
            "queue", self.queue.run(self.reconciler.reconcile, workers=self._settings.workers)
        )
        self._spawn("progress", self.coordinators.run())
        self._spawn("resync", self._keep_synced())
        self._spawn("prune", self._keep_pruned())
        settings = build_settings(self._settings.namespaces)
        registry = build_registry(
            self.take, self._connection, on_start=self._start, on_stop=self._drain
        )
        try:
            await kopf.operator(
                registry=registry,
                settings=settings,
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.namespaces,
                stop_flag=self._stop,
            )
        except Exception as error:  # noqa: BLE001
            # A watch that died, a login that failed: the process ends, and the next start lists everything
            # anew.
            self._fault = self._fault or error

    async def _start(self) -> None:
        self._is_synced = True

    async def _drain(self) -> None:
        """Let what is being worked on come to its end before kopf cancels what it finds."""
        await self.queue.close(seconds=3.0)
        await self.coordinators.close()
        await self._health.close()

    async def _close(self) -> None:
        await self.queue.close(seconds=1.0)
        await self.coordinators.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self.gate, LeaseGate):
            await self.gate.release(self._lease_kube)
        if self._webhook is not None:
            await self._webhook.close()
        await self._health.close()
        await self.kube.close()
        await self._lease_kube.close()

    # ---- news ----------------------------------------------------------------------------------------------

    def take(self, resource: str, raw: Raw, kind: str | None) -> None:
        """What a watch shows. ``kind``: None where kopf has listed anew, at the start and after a gap."""
        self.metrics.last_event.labels(resource).set_to_current_time()
        if kind is None:
            self._is_listed_anew.set()
        for key in self.mirror.see(
            resource, raw, is_deleted=kind == "DELETED", is_watched=True
        ):
            self.queue.add(key)

    def _hear_news(self, key: Key, is_urgent: bool) -> None:
        self.queue.add(key, after=0.0 if is_urgent else _PROGRESS_PAUSE)

    async def _resync(self) -> None:
        """List everything: what the watches lost comes, and what is gone goes."""
        # Also of kinds that are switched off: those that were made before are taken away.
        children = (CONFIG_MAP, SERVICE, BUDGET, NETWORK_POLICY)
        changed: set[Key] = set()
        for scope in self._settings.scopes:
            covers = partial(_is_within, scope)
            for resource, kind, selector in _WATCHED:
                raws, version = await self.kube.list_all(kind, scope, selector=selector)
                changed |= self.mirror.replace(resource, raws, version=version, covers=covers)
            lists = [
                await self.kube.list_all(kind, scope, selector=LABEL_RUN, metadata_only=True)
                for kind in children
            ]
            found = [raw for raws, _ in lists for raw in raws]
            changed |= self.mirror.replace(
                CHILDREN, found, version=min(version for _, version in lists), covers=covers
            )
        for key in changed:
            self.queue.add(key)

    async def _keep_pruned(self) -> None:
        """Drop what vanished in a gap of a watch, also of the one at the start: kopf lists anew and tells
        only what is left.

        All resources are looked at whatever list was new: one that is empty by now shows nothing at all.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRUNE_SECONDS):
                    await self._is_listed_anew.wait()
            is_late = max(self.mirror.expectations.lag().values()) > _LATE_SECONDS
            if not self._is_listed_anew.is_set() and not is_late:
                continue
            # What is shown later than this belongs to another list, and is looked at once more.
            self._is_listed_anew.clear()
            try:
                await self._prune()
            except ApiError as error:
                log.warning("what vanished in a gap of a watch is looked for later: %s", error)
                self._is_listed_anew.set()
            await asyncio.sleep(PRUNE_SECONDS)

    async def _prune(self) -> None:
        changed: set[Key] = set()
        for scope in self._settings.scopes:
            for resource, kind, selector in _WATCHED:
                found, version = await self.kube.list_all(
                    kind, scope, selector=selector, metadata_only=True
                )
                changed |= self.mirror.prune(
                    resource, found, version=version, covers=partial(_is_within, scope)
                )
        for key in changed:
            self.queue.add(key)

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds * random.uniform(0.9, 1.1))
            try:
                await self._resync()
            except ApiError as error:
                log.warning("the resync comes later: %s", error)
            for key in self.mirror.known():
                self.queue.add(
                    key, after=random.uniform(0.0, self._settings.resync_seconds / 4)
                )

    # ---- how it goes ---------------------------------------------------------------------------------------

    def _find_stall(self) -> str | None:
        state = self.queue.observe()
        if max(state.longest_work, state.oldest_age) > STALLED_SECONDS:
            return (
                f"work stands still: {state.longest_work:.0f} s on one run, {state.oldest_age:.0f} s "
                "waiting for a turn"
            )
        late = {
            resource: lag
            for resource, lag in self.mirror.expectations.lag().items()
            if lag > STALLED_SECONDS
        }
        if late and self._is_synced:
            behind = ", ".join(f"{resource} by {lag:.0f} s" for resource, lag in late.items())
            return f"a watch is behind: {behind}"
        if isinstance(self.gate, LeaseGate) and self._is_synced and self.gate.remaining() <= 0:
            return "the lease is lost"
        return None

    def _find_unready(self) -> str | None:
        return (
            None
            if self._is_synced or self._is_standing_by
            else "not in step with the API server yet"
        )

    async def _measure_lag(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            self.metrics.loop_lag.observe(max(0.0, time.monotonic() - started - _LAG_SECONDS))

    def _gather(self) -> Callable[[], bytes]:
        self._collector.facts = self._read_facts()
        return self.metrics.render

    def _read_facts(self) -> Facts:
        state = self.queue.observe()
        return Facts(
            queue_depth=state.depth,
            queue_oldest_age=state.oldest_age,
            queue_adds=state.added,
            watch_lag=self.mirror.expectations.lag(),
            objects=self.mirror.count(),
            phases=count_phases(self.mirror.runs().values()),
            runs=read_runs(self.mirror.runs(), now=time.time()),
        )

    # ---- helpers -------------------------------------------------------------------------------------------

    def _build_kube(self, limits: Limits) -> Kube:
        is_for_lease = limits.in_flight == 2
        return Kube(
            self._connection.build_client(),
            gate=OpenGate() if is_for_lease else self.gate,
            limits=limits,
            observer=self.metrics.observe_request,
            on_unauthorized=self._connection.expire_token,
        )

    def _build_webhook(self) -> Webhook:
        settings = self._settings
        called = WebhookSettings(
            host=settings.host,
            port=settings.webhook_port,
            namespace=settings.key_namespace,
            service=settings.webhook_service,
            secret=settings.webhook_secret,
            configuration=settings.webhook_configuration,
            files=settings.webhook_files,
            is_early=settings.webhook_early,
        )
        webhook = Webhook(called, self.kube, leads=lambda: self.gate.remaining() > 0)
        webhook.on_review = lambda is_allowed: self.metrics.reviews.labels(
            "allowed" if is_allowed else "denied"
        ).inc()
        return webhook

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Work beside the rest; its failure ends the process."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()
            self._stop.set()

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Whether ``work`` came to its end before the process was asked to stop. Raises what it raises."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return not self._stop.is_set()
            return False
        finally:
            for one in (task, stop):
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError, ApiError):
                    await one


def _is_within(scope: str | None, namespace: str) -> bool:
    return scope in (None, namespace)


def _lease_settings(settings: Settings) -> LeaseSettings:
    return LeaseSettings(
        settings.lease_namespace, settings.lease_name, settings.identity, settings.lease_seconds
    )


async def run_operator(settings: Settings, environ: Mapping[str, str]) -> int:
    """Build and run one operator. Raises SettingsError for what no new start mends."""
    check_kopf(describe_kopf())
    connection = await connect(environ)
    return await Service(settings, connection).run()

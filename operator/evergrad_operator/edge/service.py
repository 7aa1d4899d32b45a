"""The running operator: builds its parts, runs their tasks, and ends them in order.

This module only connects the parts and makes no decision about runs.
"""

import asyncio
import contextlib
import gc
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import kopf

from evergrad_operator.core.objects.errors import ApiError, LeaseLostError
from evergrad_operator.core.objects.names import Key
from evergrad_operator.edge.api.access import check_access
from evergrad_operator.edge.api.connection import Connection, connect
from evergrad_operator.edge.api.event_recorder import Recorder
from evergrad_operator.edge.api.kube import Kube
from evergrad_operator.edge.api.lease import LeaseGate, LeaseSettings
from evergrad_operator.edge.api.tokens import derive_token, load_key
from evergrad_operator.edge.api.transport import Gate, OpenGate, RequestLimits
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.namespace_profiles import NamespaceProfiles
from evergrad_operator.edge.cache.queue import WorkQueue
from evergrad_operator.edge.cache.store import PODS, RUNS
from evergrad_operator.edge.cache.sync import CacheSync
from evergrad_operator.edge.handlers import (
    build_registry,
    build_settings,
    check_kopf,
    describe_kopf,
)
from evergrad_operator.edge.metrics.endpoint import HealthServer
from evergrad_operator.edge.metrics.fleet_page import FleetPage
from evergrad_operator.edge.metrics.health_checks import Vitals
from evergrad_operator.edge.metrics.operator_metrics import FactsCollector, OperatorMetrics
from evergrad_operator.edge.reconcile.coordinator_poller import Coordinators, PollSettings
from evergrad_operator.edge.reconcile.reconciler import Reconciler
from evergrad_operator.edge.settings import OperatorSettings
from evergrad_operator.edge.webhook.server import Webhook, WebhookSettings

log = logging.getLogger(__name__)
_SPACING = 0.1
"""Minimum seconds between two passes over one run, because events of its pods arrive in bursts."""
_PROGRESS_PAUSE = 2.0
"""Minimum delay, in seconds, of a pass that is caused only by progress."""
_PROGRESS_PASSES = 100.0
"""Maximum number of such passes per second. With more runs, their delay grows.

Each pass takes some milliseconds of the event loop, and most of them a write to the API server. The
replacement of a lost pod must not wait for them.
"""
_RETRY_SECONDS = 2.0
"""Seconds between two tries of a request at the start or after a lost lease, if the API server is down."""


class Service:
    """One operator process."""

    def __init__(self, settings: OperatorSettings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self.metrics = metrics = OperatorMetrics(revision=settings.revision)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self._fault: BaseException | None = None

        # Build the clients of the API server. The lease has its own connections, so that queued requests for
        # runs do not delay its renewal.
        self.gate = _build_gate(settings)
        self.kube = self._build_kube(RequestLimits(in_flight=settings.in_flight), self.gate)
        limits = RequestLimits(in_flight=2, request_seconds=5.0, tries=2)
        self._lease_kube = self._build_kube(limits, OpenGate())

        # Build the cache of the cluster, and the queue of runs to reconcile.
        self.cache = InformerCache()
        self.cache.on_defect = lambda _: metrics.reconcile_errors.labels("Defect").inc()
        self.queue: WorkQueue[Key] = WorkQueue(spacing=_SPACING)
        self.sync = CacheSync(
            self.kube,
            cache=self.cache,
            queue=self.queue,
            scopes=settings.scopes,
            resync_seconds=settings.resync_seconds,
        )
        self.sync.on_event = lambda name: metrics.last_event.labels(
            name
        ).set_to_current_time()

        self.coordinators = _build_coordinators(settings, self.queue, self.gate, metrics)

        # Build the reconciler of single runs.
        recorder = Recorder(
            self.kube, on_post=lambda name: metrics.events.labels(name).inc()
        )
        self.reconciler = Reconciler(
            self.kube,
            cache=self.cache,
            coordinators=self.coordinators,
            recorder=recorder,
            config=settings.config,
            metrics=metrics,
        )
        self.reconciler.on_forget = self.queue.drop
        self.sync.find_pod_group = self.reconciler.gang_api.find
        self.reconciler.statuses.on_missing = self.sync.expect_gap
        self._webhook = _build_webhook(settings, self.kube, self.gate, metrics)

        # Build health checks and metrics.
        self.vitals = Vitals(queue=self.queue, cache=self.cache, gate=self.gate)
        labels = settings.config.propagated_labels
        self._collector = FactsCollector(self.vitals.read_facts(), labels=labels)
        metrics.registry.register(self._collector)
        self._health = HealthServer(
            live=[self.vitals.find_stall],
            ready=[self.vitals.find_unready],
            metrics=self._prepare_metrics,
        )
        self._fleet_page = FleetPage(self.cache.store.runs.values)

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT.

        Returns the exit code: 0, or 1 after an error that a restart may fix. If the API server does not
        answer, at the start or later, the operator waits for it. It also waits for the lease, without which
        it writes nothing.
        """
        # A signal only requests the end, so that running writes are finished and the lease is released.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

        # Serve health before anything that may take long. Otherwise the kubelet would restart a slow start.
        port = await self._health.listen(self._settings.host, self._settings.port)
        log.info("serving /healthz, /readyz and /metrics on port %d", port)
        try:
            if self._settings.page_port:
                await self._fleet_page.listen(self._settings.page_port)
            config = self._settings.config
            check = partial(
                check_access,
                self.kube,
                self._settings.scopes,
                gang=config.gang,
                deletes_runs=config.allow_run_deletion,
            )
            if not await self._unless_stopped(self._until_answered(check)):
                return 0
            self._spawn("event loop lag", self.vitals.measure_lag(self.metrics))
            # Start the webhook before the lease is held, because a standby serves it, too.
            if self._webhook is not None:
                self._spawn("webhook", self._webhook.run())
            if await self._lead():
                await self._serve()
        except (ApiError, LeaseLostError) as error:
            self._fault = error
        finally:
            # End everything that writes before the lease is released, because the next holder may start
            # immediately.
            await self.queue.close(seconds=1.0)
            await self.coordinators.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if isinstance(self.gate, LeaseGate):
                await self.gate.release(self._lease_kube)

            # Close the connections last, because the release of the lease needs one.
            if self._webhook is not None:
                await self._webhook.close()
            await self._health.close()
            await self._fleet_page.close()
            await self.kube.close()
            await self._lease_kube.close()

        if self._fault is not None:
            said = str(self._fault) or type(self._fault).__name__
            # Log an unexpected error with its traceback.
            is_foreseen = isinstance(self._fault, (ApiError, LeaseLostError))
            log.error("ends: %s", said, exc_info=None if is_foreseen else self._fault)
        return 0 if self._fault is None else 1

    async def _lead(self) -> bool:
        """Wait until this process may write. Returns False if it has to stop before."""
        gate = self.gate
        if not isinstance(gate, LeaseGate):
            self.metrics.leader.set(1)
            return not self._stop.is_set()

        # A standby must be ready, too: a rollout waits for its readiness before it ends the old leader.
        gate.on_change = lambda is_held: self.metrics.leader.set(int(is_held))
        self.vitals.is_standing_by = True
        if not await self._unless_stopped(gate.acquire(self._lease_kube)):
            return False
        self.vitals.is_standing_by = False
        self._spawn("lease", self._hold_lease(gate))
        return True

    async def _hold_lease(self, gate: LeaseGate) -> None:
        """Renew the lease. Never returns.

        If the lease is lost, all passes stop. After it is held again, everything is listed before the passes
        resume.
        """
        resuming: asyncio.Task[Any] | None = None
        while True:
            await gate.keep(self._lease_kube)

            # Cancel running passes, because they would later act on an old state. The passes are repeated, as
            # after a restart.
            if resuming is not None:
                resuming.cancel()
            await self.queue.pause()
            self.coordinators.leave_all()

            # List everything in a separate task: the lists may take longer than the lease is valid, and the
            # renewals must continue.
            await gate.acquire(self._lease_kube)
            resuming = self._spawn("fresh look", self._look_again())

    async def _look_again(self) -> None:
        """List everything, drop data that may be out of date, and resume the passes.

        Another operator may have held the lease, and may have written changes that no watch has shown yet.
        """
        await self._until_answered(self.sync.resync)
        self.reconciler.forget_hints()
        self.cache.expectations.restart()
        for run in self.cache.store.known():
            self.queue.add(run)
        self.queue.resume()
        log.info("working again over %d runs", self.cache.store.count()[RUNS])

    async def _serve(self) -> None:
        """Fill the cache, then reconcile until the stop."""

        # The tokens of all runs are derived from one key. Only the leader reads it or creates its Secret.
        async def read_key() -> None:
            settings = self._settings
            key = await load_key(self.kube, settings.key_namespace, settings.key_name)
            self.reconciler.token_of = partial(derive_token, key)

        # List everything before the first pass. Otherwise a run whose pods are not known would get new pods.
        for act in (read_key, self.sync.resync):
            if not await self._unless_stopped(self._until_answered(act)):
                return
        counts = self.cache.store.count()
        log.info("%d runs, %d pods found", counts[RUNS], counts[PODS])
        for run in self.cache.store.known():
            self.queue.add(run)

        # Freeze the cache, which lives as long as the process, so that each garbage collection skips it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)

        # These tasks run concurrently with the watches.
        reconcile = self.reconciler.reconcile
        self._spawn("queue", self.queue.run(reconcile, workers=self._settings.workers))
        self._spawn("progress", self.coordinators.run())
        self._spawn("resync", self.sync.keep_synced())
        self._spawn("prune", self.sync.keep_pruned())

        # kopf runs the watches and delivers events until the stop.
        async def start() -> None:
            self.vitals.is_synced = True

        async def drain() -> None:
            # At its end, kopf cancels all tasks. Let running passes finish before.
            await self.queue.close(seconds=3.0)
            await self.coordinators.close()
            await self._health.close()

        registry = build_registry(
            self.sync.take,
            self._connection,
            on_start=start,
            on_stop=drain,
        )
        namespaces = self._settings.namespaces
        try:
            await kopf.operator(
                registry=registry,
                settings=build_settings(namespaces),
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=self._stop,
            )
        except Exception as error:  # noqa: BLE001
            # If a watch has ended or a login has failed, end the process. Its next start lists everything.
            self._fault = self._fault or error

    # ---- helpers -------------------------------------------------------------------------------------------

    async def _until_answered(self, act: Callable[[], Awaitable[None]]) -> None:
        """Await ``act``, and retry it while the API server does not answer or the lease is not held.

        Raises ApiError if the API server refuses the request for another reason.
        """
        reported = ""
        while True:
            try:
                await act()
            except (ApiError, LeaseLostError) as error:
                if isinstance(error, ApiError) and not error.is_transient:
                    raise
                # Log an outage only once, unless its cause changes.
                said = str(error)
                if said != reported:
                    log.warning("waiting for the API server: %s", said)
                reported = said
            else:
                if reported:
                    log.info("the API server answers again")
                return
            await asyncio.sleep(_RETRY_SECONDS * random.uniform(0.7, 1.3))

    def _prepare_metrics(self) -> Callable[[], bytes]:
        # Read the facts in the event loop, where they are changed. The result is rendered in a thread.
        self._collector.facts = self.vitals.read_facts()
        return self.metrics.render

    def _build_kube(self, limits: RequestLimits, gate: Gate) -> Kube:
        return Kube(
            self._connection.build_client(),
            gate=gate,
            limits=limits,
            observer=self.metrics.observe_request,
            on_unauthorized=self._connection.expire_token,
        )

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task. If it fails, the process ends."""

        def end(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._fault = self._fault or task.exception()
                self._stop.set()

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(end)
        # Drop ended tasks, because each loss of the lease starts one more task.
        self._tasks = [*(one for one in self._tasks if not one.done()), task]
        return task

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Wait for ``work`` or the stop, and return whether the work ended first. Raises its exceptions."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return not self._stop.is_set()
            return False
        finally:
            # Await both tasks, so that the work does not continue while the process ends.
            for one in (task, stop):
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError, ApiError):
                    await one


def _build_gate(settings: OperatorSettings) -> LeaseGate | OpenGate:
    if not settings.lease:
        return OpenGate()
    lease = LeaseSettings(
        settings.lease_namespace,
        settings.lease_name,
        settings.identity,
        settings.lease_seconds,
    )
    return LeaseGate(lease)


def _build_coordinators(
    settings: OperatorSettings, queue: WorkQueue[Key], gate: Gate, metrics: OperatorMetrics
) -> Coordinators:
    poll = PollSettings(every=settings.poll_seconds, port=settings.coordinator_port)
    coordinators = Coordinators(poll)
    coordinators.gate = gate

    def queue_news(key: Key, is_urgent: bool) -> None:
        pause = max(_PROGRESS_PAUSE, coordinators.count() / _PROGRESS_PASSES)
        queue.add(key, after=0.0 if is_urgent else pause)

    coordinators.on_news = queue_news
    coordinators.on_failure = lambda cause: metrics.poll_failures.labels(cause).inc()
    return coordinators


def _build_webhook(
    settings: OperatorSettings,
    kube: Kube,
    gate: Gate,
    metrics: OperatorMetrics,
) -> Webhook | None:
    if not settings.webhook:
        return None
    # The webhook's Service and Secret are in the operator's namespace, like the installation's key.
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

    def count_review(is_allowed: bool) -> None:
        metrics.reviews.labels("allowed" if is_allowed else "denied").inc()

    webhook = Webhook(
        called,
        kube,
        leads=lambda: gate.remaining() > 0,
        installation=settings.config.installation,
        fetch_profile=NamespaceProfiles(kube).fetch,
    )
    webhook.on_review = count_review
    return webhook


async def run_operator(settings: OperatorSettings, environ: Mapping[str, str]) -> int:
    """Build and run one operator, and return its exit code.

    Raises SettingsError for errors that a restart cannot fix.
    """
    check_kopf(describe_kopf())
    connection = await connect(environ)
    return await Service(settings, connection).run()

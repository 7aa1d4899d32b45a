"""Pages of simulated runs: the page of a coordinator with simulated hours, and the fleet page."""

import asyncio
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from simulated_cluster import Cluster, make_settings

from evergrad_coordinator.edge.http import StatusServer
from evergrad_coordinator.edge.journal import MemoryStore
from evergrad_coordinator.edge.live_feed import LiveFeed
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.protocol import EvaluationReport
from evergrad_operator.core.objects.times import format_duration
from evergrad_operator.edge.metrics.fleet_page import FleetPage

R = TypeVar("R")


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Site:
    """A page on loopback, served by its own thread. The test controls the simulated run."""

    def __init__(self, *, name: str = "docs-lm", num_nodes: int = 3) -> None:
        self.clock = Clock()
        settings = make_settings(expect=num_nodes, min_nodes=2, max_nodes=4)
        self.cluster = Cluster(settings)
        for node in range(num_nodes):
            self.cluster.start(node)
        self.cluster.run_until_running()
        self.group = self.cluster.group
        # The simulated nodes use another name for the run.
        self.group.settings = dataclasses.replace(settings, run=name)
        self.feed = LiveFeed(clock=self.clock)
        self.token = settings.token
        self.step = 0
        self.port = 0
        self.instance = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @contextmanager
    def serving(self, host: str = "127.0.0.1") -> Iterator["Site"]:
        """Serve until the block ends."""
        self._thread.start()
        servers: list[StatusServer] = []

        async def begin() -> None:
            server = Server(self.group, MemoryStore(), log=lambda *_, **__: None)
            servers.append(StatusServer(server, self.feed))
            self.port = await servers[0].listen(host, 0)
            self.instance = servers[0].instance

        async def end() -> None:
            for one in servers:
                one.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(begin(), self._loop).result(60)
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def call(self, act: Callable[[], R]) -> R:
        """Run a function in the thread of the server, which owns its values."""

        async def do() -> R:
            return act()

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result(60)

    def train(self, seconds: int, *, steps_a_second: int = 1) -> None:
        """Advance the clock by this number of seconds, each with a report and an update of the page."""
        # In parts, so that an open page can read in between.
        for begin in range(0, seconds, 50):
            part = min(50, seconds - begin)
            self.call(functools.partial(self._train, part, steps_a_second))

    def _train(self, seconds: int, steps_a_second: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.step += steps_a_second
            self.report()
            self.feed.update()

    def report(self) -> None:
        training, step = self.group.training, self.step
        # The simulated cluster is paused, and the nodes keep their last activity.
        self.group.ledger.close_interval(now=self.clock.now)
        wave = math.sin(step * 12.9898) * 0.5
        training.step, training.updated_at = step, self.clock.now
        training.total_steps = 1_000_000 if step > 2000 else 2000
        training.loss = 2.1 + 3.2 * math.exp(-step / 300) + 0.12 * wave
        training.tokens_per_second = 41_000 + 2_500 * wave
        training.eta_seconds = float(training.total_steps - step)
        training.values = {
            "learning_rate": 1e-3 * min(1.0, step / 60),
            "grad_norm": 0.8 + 0.3 * abs(wave),
            "router_loss": 0.02 + 0.01 * math.exp(-step / 200),
        }
        training.checkpoint_step = step - step % 100 or -1
        if evaluated := step - step % 50:
            loss = 2.2 + 3.2 * math.exp(-evaluated / 300)
            training.evaluations = {
                "held_out": EvaluationReport(evaluated, {"loss": loss, "exact": 1 - math.exp(-evaluated / 500)}),
                "code": EvaluationReport(evaluated, {"loss": loss + 0.3}),
            }  # fmt: skip

    def note(self, event: str, **fields: Any) -> None:
        self.call(lambda: self.feed.log(event, **fields))


@contextmanager
def fleet_page(runs: list[dict[str, Any]]) -> Iterator[str]:
    """The address of the operator's fleet page of these runs, served by its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    page = FleetPage(lambda: list(runs))
    try:
        port = asyncio.run_coroutine_threadsafe(page.listen(0), loop).result(60)
        yield f"http://127.0.0.1:{port}/"
    finally:
        asyncio.run_coroutine_threadsafe(page.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_of(
    name: str, phase: str, step: int, *, eta_seconds: int | None = None, **more: Any
) -> dict[str, Any]:
    progress: dict[str, Any] = {
        "step": step,
        "totalSteps": 20000,
        "loss": f"{2 + 100 / (step + 50):.3f}",
    }
    if phase == "Running":
        eta = (20 - step // 1000) * 3600 + 720 if eta_seconds is None else eta_seconds
        progress |= {
            "tokensPerSecond": f"{step / 100:.3g}k",
            "eta": format_duration(eta),
            "etaSeconds": eta,
        }
    return {
        "metadata": {"name": name, "namespace": "lab", "creationTimestamp": f"2026-03-01T12:00:{step % 60:02d}Z"},
        "spec": {},
        "status": {"phase": phase, "nodes": {"summary": "3/4"}, "progress": progress, **more},
    }  # fmt: skip


FLEET = [
    run_of("docs-lm", "Running", 1200, message="3 nodes, 3 workers", checkpoint={"step": 1200}),
    run_of("code-lm", "Running", 9100, message="4 nodes, 4 workers", checkpoint={"step": 9000}),
    run_of("preference", "Waiting", 300, message="1 node connected; at least 2 needed", restarts={"total": 4}),
    run_of("<b>molecules</b>", "Failed", 40, message="data.sources[0].path: there is no such file"),
    run_of("small", "Complete", 20000, message="all workers ended well"),
]  # fmt: skip

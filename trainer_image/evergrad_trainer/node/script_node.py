"""Runs a node of a script's run: its workers, and the file and socket through which they observe their
node."""

import asyncio
import dataclasses
import functools
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from evergrad.node_state import STOP_SECONDS_VARIABLE
from evergrad_manifest.envelope.script import Script
from evergrad_manifest.errors import ConfigurationError
from evergrad_trainer.node.fresh import FreshWorkers, Stops
from evergrad_trainer.node.log import speaking_as
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.run import build_metrics, serve
from evergrad_trainer.node.script_worker import can_fork, run_script
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.node.stragglers import Stragglers
from evergrad_trainer.node.supervisor import Supervisor
from evergrad_trainer.node.workers import Worker, WorkerOrder, start_worker
from evergrad_trainer.worker.node_state import NodeStateServer

_log = logging.getLogger(__name__)
_MARGIN_SECONDS = 1.0
_LONGEST_SILENCE = 1e6
"""Upper limit for the time since the last contact. It is infinite before the first contact."""


def run_script_node(
    script: Script, base_directory: Path, settings: NodeSettings, *, num_workers: int
) -> int:
    """Run a node of a script's run until the run is over, and return the exit code."""
    try:
        metrics = build_metrics(script.metrics, settings)
    except ConfigurationError as error:
        # The endpoint's error names the field of a training, so replace it with the field of a script.
        (problem,) = error.problems
        raise ConfigurationError(
            dataclasses.replace(problem, path="spec.script.metrics.port")
        ) from error

    async def serve_script() -> int:
        reason = can_fork()
        if reason is not None:
            _log.warning("workers are started cold: %s", reason)
        with tempfile.TemporaryDirectory(prefix="evergrad-node-") as folder:
            node = _ScriptNode(
                script,
                base_directory,
                settings,
                metrics,
                Path(folder),
                is_warm=reason is None,
            )
            worker_group = node.build_worker_group(num_workers)

            # Workers need the state file and the socket when they start.
            await node.node_state.start()
            try:
                return await serve(node.supervisor, worker_group, settings)
            finally:
                await node.node_state.close()

    with speaking_as(settings.node):
        return asyncio.run(serve_script())


def with_grace_of(script: Script, settings: NodeSettings) -> NodeSettings:
    """Return settings with which the node does not leave alone before its script has had its time to save."""
    return dataclasses.replace(
        settings,
        grace_seconds=max(settings.grace_seconds, float(script.grace_period_seconds)),
    )


def stop_seconds(grace_seconds: float) -> float:
    """Return how many seconds a script may continue after a request to stop, so that it leaves before its
    node kills it."""
    return grace_seconds - min(_MARGIN_SECONDS, grace_seconds / 10)


class _ScriptNode:
    """The supervisor of a script's workers, and the state file that it keeps up to date for them."""

    def __init__(
        self,
        script: Script,
        base_directory: Path,
        settings: NodeSettings,
        metrics: NodeMetrics,
        folder: Path,
        *,
        is_warm: bool,
    ) -> None:
        """``is_warm``: fork workers from this process, which has imported what they need."""
        self._script = script
        self._base_directory = base_directory
        self._settings = settings
        self._worker_group: FreshWorkers | None = None
        self._is_warm = is_warm
        self.supervisor = Supervisor(settings, metrics=metrics, on_tick=self._announce)
        self.node_state = NodeStateServer(
            folder / "state",
            on_report=self.supervisor.reported,
            may_commit=self.supervisor.conversation.commit,
        )

    def build_worker_group(self, num_workers: int) -> FreshWorkers:
        """Build the script's workers, a new set for each generation. Call this on the running event loop."""
        self._worker_group = FreshWorkers(
            self._start,
            num_workers=num_workers,
            report=self.supervisor.take,
            stops=Stops(
                self.node_state.has_guard, float(self._script.grace_period_seconds)
            ),
            call_later=asyncio.get_running_loop().call_later,
            stragglers=Stragglers(
                limit_seconds=float(self._script.finish_grace_period_seconds),
                end=self.supervisor.end_hung,
            ),
        )
        return self._worker_group

    def _announce(self) -> None:
        """Write the state for workers: generations, lease, and whether the workers leave the group in
        order."""
        conversation = self.supervisor.conversation
        place = self._worker_group.place if self._worker_group is not None else None
        silence = min(conversation.seconds_since_contact, _LONGEST_SILENCE)
        self.node_state.announce(
            newest_generation=conversation.known_generation,
            own_generation=place.generation if place is not None else 0,
            contact=time.monotonic() - silence,
            is_draining=self.supervisor.is_draining,
            lease_seconds=conversation.lease_seconds,
        )

    def _start(
        self,
        local_rank: int,
        serial: int,
        variables: Mapping[str, str],
    ) -> Worker:
        # Do this before the worker runs: it would use the generation that the file still contains.
        self._announce()
        script, settings = self._script, self._settings
        target = functools.partial(
            run_script,
            script=script,
            base_directory=self._base_directory,
            is_warm=self._is_warm,
        )
        order = WorkerOrder(
            local_rank, serial, "fork", "both", f"{settings.node}.{local_rank}"
        )
        # The script's own variables are set last, in its process, so that they take precedence.
        own = {
            **variables,
            **self.node_state.environment,
            STOP_SECONDS_VARIABLE: f"{stop_seconds(script.grace_period_seconds):g}",
        }
        return self.supervisor.adopt(start_worker(target, order, variables=own))

"""The agent's own workers as reported to the coordinator: their reports, the end of the first worker that
fails, and that all have exited."""

import asyncio
import time
from collections.abc import Callable

from evergrad_coordinator.protocol import Message, Placement, Ready
from evergrad_trainer.torchrun.agent_reports import WorkerReports
from evergrad_trainer.torchrun.agent_state import AgentState
from evergrad_trainer.torchrun.agent_workers import SeenEnd, WorkerWatch, build_broken, say


class AgentMembers:
    """Runs on the conversation's thread, except ``send_broken``, which both threads call with
    ``state.changed`` held."""

    def __init__(
        self,
        state: AgentState,
        *,
        say_now: Callable[[list[Message]], None],
        send: Callable[[Message], None],
        on_change: Callable[[], None],
    ) -> None:
        """``say_now`` sends immediately; ``send`` can be called from any thread.

        ``on_change``: called when the node state file must be written again.
        """
        self.state = state
        self.reports = WorkerReports()
        self.watch: WorkerWatch | None = None
        self._finding: asyncio.Task[None] | None = None
        """Reference that prevents the search for workers from being garbage-collected."""
        self._say_now = say_now
        self._send = send
        self._on_change = on_change

    def begin_watch(self, port: int) -> None:
        if self.watch is not None:
            self.watch.close()
        self.watch = WorkerWatch(port=port, on_end=self._take_worker_end)
        self._finding = asyncio.create_task(self.watch.find())

        def note_end(task: asyncio.Task[None]) -> None:
            # An error in this task would not be logged, and the ends of workers would not be noticed.
            if not task.cancelled() and task.exception() is not None:
                say(
                    "the agent's workers cannot be watched, so that their ends are told without a "
                    f"cause: {task.exception()!r}"
                )

        self._finding.add_done_callback(note_end)
        self._on_change()

    def _take_worker_end(self, end: SeenEnd) -> None:
        if end.exit_code == 0:
            return
        with self.state.changed:
            place = self.state.place
            # The first end is the cause; later ends are its consequences.
            self.state.first_end = self.state.first_end or end
            self.state.changed.notify_all()
            if (
                place is not None
                and self.state.newest <= place.generation
                and not self.state.is_stopping_workers
                and end.exit_code is not None
            ):
                self.send_broken(place)

    def say_ready_to_leave(self) -> None:
        """Answer the newest plan when the workers have exited, because a leaving agent joins no other
        group."""
        state = self.state
        with state.changed:
            is_out = (
                state.is_out
                or state.place is None
                or (self.watch is not None and self.watch.are_gone)
            )
            plan = state.plan
            if is_out and plan is not None and state.answered_generation < plan.generation:
                state.answered_generation = plan.generation
                self._send(Ready(plan.generation, workers=0, port=0))
                state.changed.notify_all()

    def take_report(self, report: dict[str, object]) -> None:
        with self.state.changed:
            self._say_now(self.reports.take(report, now=time.monotonic()))

    def flush_report(self) -> None:
        with self.state.changed:
            self._say_now(self.reports.flush(now=time.monotonic()))

    def send_broken(self, place: Placement) -> None:
        if self.state.broken_generation < place.generation and not self.state.is_leaving:
            self.state.broken_generation = place.generation
            end, step = self.state.first_end, self.reports.step
            self._send(
                build_broken(
                    place.generation,
                    end=end,
                    world_size=place.world_size,
                    step=step,
                    now=time.monotonic(),
                )
            )

"""The effects of the rules, carried out in their order; those behind a new number wait for the journal."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from evergrad_common.contract import ExitCode
from evergrad_coordinator.edge.bounded_log import BoundedLog
from evergrad_coordinator.edge.journal import GenerationStore, JournalError
from evergrad_coordinator.rules.state import Effect, Finish, Persist


class EffectQueue:
    """Carries out effects.

    =======  ===========================================================================================
    open     each effect is carried out at once
    waiting  a number is on its way to the disk: all effects behind it wait, so that nobody learns of it
             before; a ``Persist`` is carried out once its number is durable
    closed   another coordinator has taken the number: nothing is carried out any more
    =======  ===========================================================================================

    ``most``: effects that may wait; their cause is to be avoided while ``is_full``.
    """

    def __init__(
        self,
        store: GenerationStore,
        carry_out: Callable[[Effect], None],
        *,
        log: BoundedLog,
        most: int,
        retry_seconds: float,
    ) -> None:
        self.is_writable = True
        """Whether the journal took the newest number."""
        self.num_failures = 0
        """Attempts to write the journal that failed."""
        self._store, self._carry_out, self._log = store, carry_out, log
        self._most, self._retry_seconds = most, retry_seconds
        self._effects: deque[Effect] = deque()
        self._persisting: asyncio.Task[None] | None = None
        self._persisting_since = 0.0
        self._is_carrying_out = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of effects that are not carried out yet."""
        return len(self._effects)

    @property
    def is_superseded(self) -> bool:
        """Whether another coordinator has taken the number, and nothing is carried out any more."""
        return self._is_closed

    @property
    def has_stopped(self) -> bool:
        """Whether the task that writes the journal has ended although effects wait for it."""
        return (
            self._persisting is not None and self._persisting.done() and not self._is_closed
        )

    @property
    def seconds_waiting(self) -> float:
        """Seconds for which the newest number has been on its way to the disk; 0 if none is."""
        is_waiting = self._persisting is not None and not self._is_closed
        return time.monotonic() - self._persisting_since if is_waiting else 0.0

    @property
    def is_full(self) -> bool:
        """Whether so many wait for the journal that no others should be caused."""
        return self.num_waiting >= self._most

    def add(self, effects: Iterable[Effect]) -> None:
        """Carry out effects, after those that wait already."""
        if not self._is_closed:
            self._effects.extend(effects)
            self._go_on()

    def cancel(self) -> None:
        """Wait for the journal no more: what is behind its number is not carried out."""
        if self._persisting:
            self._persisting.cancel()

    def _go_on(self) -> None:
        # An effect may cause others: a node that does not read is lost, which concerns all others. The loop
        # that is under way takes those, since a call within a call for each node would have no bound.
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            while self._effects and self._persisting is None:
                effect = self._effects.popleft()
                if isinstance(effect, Persist):
                    self._persisting_since = time.monotonic()
                    self._persisting = asyncio.create_task(self._persist(effect))
                    self._persisting.add_done_callback(_report_error)
                else:
                    self._carry_out(effect)
        finally:
            self._is_carrying_out = False

    async def _persist(self, effect: Persist) -> None:
        """Make a number durable, and go on."""
        # Retried without end: no other process may decide, and training continues; /readyz shows the wait.
        # Any error is retried. Without this task the group would never change again, and an error such as
        # "can't start new thread" passes like a full disk.
        while True:
            try:
                is_ours = await asyncio.to_thread(
                    self._store.advance, effect.expected, effect.generation
                )
                break
            except Exception as error:  # noqa: BLE001
                self.is_writable = False
                self.num_failures += 1
                is_known = isinstance(error, OSError | JournalError)
                self._log.say(
                    "journal_failed",
                    error=str(error) if is_known else repr(error),
                    newGeneration=effect.generation,
                )
                await asyncio.sleep(self._retry_seconds)
        self.is_writable = True

        # Another coordinator has the number. The effects that wait belong to a group that must never begin.
        if not is_ours:
            self._log.say_always(
                "superseded",
                message="another coordinator has taken the next generation: this one ends",
            )
            self._is_closed = True
            self._effects.clear()
            self._carry_out(Finish(ExitCode.INTERNAL))
            return

        self._persisting = None
        try:
            self._carry_out(effect)
        finally:
            self._go_on()


def _report_error(task: asyncio.Task[None]) -> None:
    """Report an error with which the task has ended: the event loop would keep it to itself."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": "the journal's task has ended", "exception": error}
        )

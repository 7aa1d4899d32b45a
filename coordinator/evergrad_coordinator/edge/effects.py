"""Carries out the effects of the rules in order. Effects after a new generation wait for the journal."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from evergrad_common.contract import ExitCode
from evergrad_coordinator.edge.bounded_log import BoundedLog
from evergrad_coordinator.edge.journal import GenerationStore, JournalError
from evergrad_coordinator.rules.state import Effect, Finish, Persist


class EffectQueue:
    """A queue that carries out effects in order. It has three states:

    =======  ===========================================================================================
    open     each effect is carried out immediately
    waiting  a generation is being written to the disk; all later effects wait, so that no node receives
             the number before it is durable; then its ``Persist`` is carried out
    closed   another coordinator has taken the number; no effect is carried out any more
    =======  ===========================================================================================

    ``most``: number of waiting effects at which ``is_full`` becomes true. Callers then avoid new effects.
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
        """Whether the last write of the journal succeeded."""
        self.num_failures = 0
        """Number of failed attempts to write the journal."""
        self._store, self._carry_out, self._log = store, carry_out, log
        self._most, self._retry_seconds = most, retry_seconds
        self._effects: deque[Effect] = deque()
        self._persisting: asyncio.Task[None] | None = None
        self._persisting_since = 0.0
        self._is_carrying_out = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of effects that have not been carried out yet."""
        return len(self._effects)

    @property
    def is_superseded(self) -> bool:
        """Whether another coordinator has taken the number, so that no effect is carried out any more."""
        return self._is_closed

    @property
    def has_stopped(self) -> bool:
        """Whether the task that writes the journal has ended although effects wait for it."""
        return (
            self._persisting is not None and self._persisting.done() and not self._is_closed
        )

    @property
    def seconds_waiting(self) -> float:
        """Seconds for which the journal has been writing the newest number; 0 if it is not writing."""
        is_waiting = self._persisting is not None and not self._is_closed
        return time.monotonic() - self._persisting_since if is_waiting else 0.0

    @property
    def is_full(self) -> bool:
        """Whether so many effects wait for the journal that callers should not cause more."""
        return self.num_waiting >= self._most

    def add(self, effects: Iterable[Effect]) -> None:
        """Carry out effects after all effects that are already waiting."""
        if not self._is_closed:
            self._effects.extend(effects)
            self._go_on()

    def cancel(self) -> None:
        """Stop waiting for the journal. The effects after its number are not carried out."""
        if self._persisting:
            self._persisting.cancel()

    def _go_on(self) -> None:
        # An effect may cause others: for example, a node that does not read is lost, which affects all other
        # nodes. The running loop carries these out, because nested calls would have an unbounded depth.
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
        """Make a number durable, then continue with the waiting effects."""
        # Retry without a limit: no other process may decide, training continues, and /readyz reports the
        # wait. Retry after any error: without this task the group would never change again, and errors such
        # as "can't start new thread" are as temporary as a full disk.
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

        # Another coordinator has taken the number. The waiting effects belong to a group that must not start.
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
    """Report the error of an ended task to the loop's exception handler, which otherwise would not get it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": "the journal's task has ended", "exception": error}
        )

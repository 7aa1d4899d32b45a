"""Runs the concurrent tasks of a supervisor, and reports each task that fails: a node without one of its
tasks would only appear to be alive."""

import asyncio
from collections.abc import Callable, Coroutine

OnFailure = Callable[[str, BaseException], None]


class TaskWatch:
    """Runs tasks and callbacks of an event loop, and calls ``on_failure(name, error)`` for each failure."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def begin(
        self,
        work: Coroutine[object, object, None],
        name: str,
        *,
        is_endless: bool = False,
    ) -> None:
        """Run ``work`` concurrently with the other tasks.

        If ``is_endless`` is true, the end of ``work`` also counts as a failure.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)

        def note_end(task: asyncio.Task[None]) -> None:
            # Keep a reference until here: the loop holds only weak references, so a running task could be
            # garbage-collected.
            self._tasks.discard(task)
            if task.cancelled():
                return
            error = task.exception()
            if error is None and is_endless and not self._is_closed:
                error = RuntimeError("it ended early")
            if error is not None:
                self._on_failure(name, error)

        task.add_done_callback(note_end)

    def call(self, act: Callable[..., None], *arguments: object) -> None:
        """Call ``act`` and report its error, because the event loop would only log it."""
        try:
            act(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner ends with it as its reason
            self._on_failure(act.__name__.strip("_"), error)

    def expect_ends(self) -> None:
        """Allow endless tasks to end from now on."""
        self._is_closed = True

    def close(self) -> None:
        """Cancel all tasks that still run."""
        self._is_closed = True
        # Iterate over a copy, because each cancelled task removes itself from the set.
        for task in tuple(self._tasks):
            task.cancel()

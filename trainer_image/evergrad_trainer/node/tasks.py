"""The parts of a supervisor that run by themselves, none of which may end unseen: a node without one only
looks alive."""

import asyncio
from collections.abc import Callable, Coroutine

OnFailure = Callable[[str, BaseException], None]


class TaskWatch:
    """Runs tasks and callbacks of an event loop; ``on_failure(name, error)`` is called for each
    that fails."""

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
        """Run ``work`` concurrently with the others. It has failed, too, if it ends although it is
        ``is_endless``."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)

        def note_end(task: asyncio.Task[None]) -> None:
            # Kept until here: the loop holds tasks weakly, and one could vanish in the middle.
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
        """Call ``act`` and report its error: the event loop itself would only log it."""
        try:
            act(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner ends with it as its reason
            self._on_failure(act.__name__.strip("_"), error)

    def expect_ends(self) -> None:
        """From here on endless tasks may end."""
        self._is_closed = True

    def close(self) -> None:
        """Cancel what still runs."""
        self._is_closed = True
        # A copy: each cancelled task takes itself off the set.
        for task in tuple(self._tasks):
            task.cancel()

"""Reading the micro-batches that a rank will want next, in one background thread."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from evergrad_trainer.data.batch import Batch

Key = tuple[int, int]


class Slots(Protocol):
    """A training stream: the place that micro-batches are read from."""

    def slot(self, step: int, slot: int) -> Batch: ...


class Prefetcher:
    """Reads ahead; ``take`` gives exactly the micro-batch asked for.

    Batches that were foreseen wrongly are dropped: the world, and with it this rank's slots, may change any
    time.
    """

    def __init__(
        self, stream: Slots, *, prepare: Callable[[Batch], Batch] | None = None
    ) -> None:
        """``prepare``: what is done to each micro-batch once it is read, in the thread that reads it."""
        self._stream = stream
        self._prepare = prepare
        self._changed = threading.Condition()
        self._wanted: deque[Key] = deque()
        self._reading: Key | None = None
        self._ready: dict[Key, Batch | BaseException] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def take(self, step: int, slot: int, *, upcoming: Sequence[Key] = ()) -> Batch:
        """The micro-batch of (step, slot); ``upcoming`` will probably be asked for next.

        Raises what reading it raised.
        """
        key = (step, slot)
        with self._changed:
            # The thread is at it: reading it here too would take as long again.
            while self._reading == key:
                self._changed.wait()
            found = self._ready.pop(key, None)
            # Read here what nobody has begun; the thread continues with what comes after it.
            if not self._is_closed:
                coming = [one for one in upcoming if one != key]
                self._ready = {
                    one: batch for one, batch in self._ready.items() if one in coming
                }
                known = {*self._ready, self._reading}
                self._wanted = deque(one for one in coming if one not in known)
                # Started with the first wish: a stream that is never read ahead has no thread.
                if self._wanted and self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name="evergrad-prefetch", daemon=True
                    )
                    self._thread.start()
                if self._wanted:
                    self._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        if found is None:
            return self._read(key)
        return found

    def close(self) -> None:
        """End the thread. The prefetcher can still be asked, and then reads in the caller's thread."""
        with self._changed:
            self._is_closed = True
            self._wanted.clear()
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _read(self, key: Key) -> Batch:
        step, slot = key
        batch = self._stream.slot(step, slot)
        if self._prepare is None:
            return batch
        return self._prepare(batch)

    def _serve(self) -> None:
        """Read what is wanted, one batch after the other, until ``close``."""
        while True:
            with self._changed:
                while not self._wanted and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                key = self._wanted.popleft()
                self._reading = key
            # Without the lock, so that ``take`` can change what is wanted meanwhile.
            result: Batch | BaseException
            try:
                result = self._read(key)
            except BaseException as error:  # noqa: BLE001 - raised again where the batch is taken
                result = error
            with self._changed:
                self._reading = None
                if not self._is_closed:
                    self._ready[key] = result
                self._changed.notify_all()

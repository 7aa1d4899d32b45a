"""Reads the micro-batches that a rank will need next, in one background thread."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from evergrad_trainer.data.batch import Batch

Key = tuple[int, int]


class Slots(Protocol):
    """A training stream, which returns the micro-batch of a slot."""

    def slot(self, step: int, slot: int) -> Batch: ...


class Prefetcher:
    """Reads micro-batches ahead. ``take`` always returns the requested micro-batch.

    Batches that are no longer needed are dropped, because the world, and so the slots of this rank, can
    change at any time.
    """

    def __init__(
        self, stream: Slots, *, prepare: Callable[[Batch], Batch] | None = None
    ) -> None:
        """``prepare``: a function that is applied to each micro-batch, in the thread that reads it."""
        self._stream = stream
        self._prepare = prepare
        self._changed = threading.Condition()
        self._wanted: deque[Key] = deque()
        self._reading: Key | None = None
        self._ready: dict[Key, Batch | BaseException] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def take(self, step: int, slot: int, *, upcoming: Sequence[Key] = ()) -> Batch:
        """Return the micro-batch of (step, slot). ``upcoming``: the micro-batches to read ahead.

        Raises the exception that reading the micro-batch raised.
        """
        key = (step, slot)
        with self._changed:
            # If the thread is reading this batch, wait for it: reading it here too would not be faster.
            while self._reading == key:
                self._changed.wait()
            found = self._ready.pop(key, None)
            # The thread reads only the upcoming batches. If this batch is not ready, it is read below.
            if not self._is_closed:
                coming = [one for one in upcoming if one != key]
                self._ready = {
                    one: batch for one, batch in self._ready.items() if one in coming
                }
                known = {*self._ready, self._reading}
                self._wanted = deque(one for one in coming if one not in known)
                # Start the thread at the first request, so that a stream without prefetching has no thread.
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
        """End the thread. After this, ``take`` reads in the caller's thread."""
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
        """Read the requested batches one after the other, until ``close``."""
        while True:
            with self._changed:
                while not self._wanted and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                key = self._wanted.popleft()
                self._reading = key
            # Read without the lock, so that ``take`` can change the requests in the meantime.
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

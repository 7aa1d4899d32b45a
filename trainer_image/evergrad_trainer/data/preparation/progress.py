"""Progress of a preparation, as its caller gets it while it works."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["scan", "tokenize", "split", "wait"]


@dataclass(frozen=True)
class PrepareProgress:
    """``bytes_done`` of ``bytes_total`` are bytes of source files, over all sources this phase has to work
    on.

    ``documents`` and ``tokens`` are those made so far in this call. Phase ``wait``: another process prepares
    the same data.
    """

    phase: Phase
    source: str
    bytes_done: int
    bytes_total: int
    documents: int = 0
    tokens: int = 0


OnProgress = Callable[[PrepareProgress], None]


class Reporter:
    """Counts what is done, and passes each change on to ``on_progress``."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._phase: Phase = "scan"
        self._source = ""
        self._done = self._total = self._documents = self._tokens = 0

    def begin(self, phase: Phase, total: int) -> None:
        """A new phase over ``total`` bytes."""
        self._phase, self._done, self._total = phase, 0, total

    def show(self, source: str, phase: Phase | None = None) -> None:
        """Work on ``source`` begins or continues; ``phase`` replaces the phase's name for now."""
        self._source = source
        self._pass_on(phase or self._phase)

    def advance(self, count: int, *, documents: int = 0, tokens: int = 0) -> None:
        """``count`` more bytes are done."""
        self._done += count
        self._documents += documents
        self._tokens += tokens
        self._pass_on(self._phase)

    def _pass_on(self, phase: Phase) -> None:
        if self._on_progress is not None:
            self._on_progress(
                PrepareProgress(
                    phase,
                    self._source,
                    self._done,
                    self._total,
                    self._documents,
                    self._tokens,
                )
            )

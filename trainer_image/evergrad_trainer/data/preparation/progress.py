"""Reports the progress of a preparation to its caller."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["scan", "tokenize", "split", "wait"]


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a preparation.

    ``bytes_done`` and ``bytes_total``: bytes of source files, over all sources of this phase. ``documents``
    and ``tokens``: numbers of documents and tokens that this call has prepared so far. In the phase ``wait``,
    another process prepares the same data.
    """

    phase: Phase
    source: str
    bytes_done: int
    bytes_total: int
    documents: int = 0
    tokens: int = 0


OnProgress = Callable[[PrepareProgress], None]


class Reporter:
    """Counts the finished work, and calls ``on_progress`` for each change."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._phase: Phase = "scan"
        self._source = ""
        self._done = self._total = self._documents = self._tokens = 0

    def begin(self, phase: Phase, total: int) -> None:
        """Start a new phase over ``total`` bytes."""
        self._phase, self._done, self._total = phase, 0, total

    def show(self, source: str, phase: Phase | None = None) -> None:
        """Report that work on ``source`` starts or continues. ``phase`` replaces the phase in this report."""
        self._source = source
        self._pass_on(phase or self._phase)

    def advance(self, count: int, *, documents: int = 0, tokens: int = 0) -> None:
        """Report that ``count`` more bytes are finished."""
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

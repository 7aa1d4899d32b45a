"""Runs jobs of ``prepare``: in this process when there is little to do, else in helper processes,
one a core."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Final, Protocol

from evergrad_manifest.errors import EvergradError, Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.chunk import ChunkResult, Job, execute
from evergrad_trainer.data.preparation.worker import describe_tokenizer
from evergrad_trainer.data.tokenizers import TextTokenizer

_MODULE: Final = "evergrad_trainer.data.preparation.worker"
_PIPE_BYTES: Final = 2**16


class Pool(Protocol):
    """Runs jobs. ``jobs`` is read lazily: a job that depends on earlier outcomes sees them."""

    def run(self, jobs: Iterable[Job]) -> Iterator[ChunkResult]:
        """Outcomes in the order the jobs finish. Raises DataError, EvergradError, OSError."""

    def close(self) -> None:
        """End what was started."""


class InlinePool:
    """Does every job in this process."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def run(self, jobs: Iterable[Job]) -> Iterator[ChunkResult]:
        for job in jobs:
            yield from execute(job, self._tokenizer)

    def close(self) -> None:
        """Do nothing: nothing was started."""


class ProcessPool:
    """Helper processes that speak JSON lines.

    Not multiprocessing: its children import the parent's main module (for a training process that is torch),
    and outlive a parent that was killed. These end with their input, whatever ended the parent.
    """

    def __init__(self, tokenizer: TextTokenizer, *, workers: int) -> None:
        self._workers: list[_Worker] = []
        self._num_workers = workers
        self._setup = describe_tokenizer(tokenizer)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Iterable[Job]) -> Iterator[ChunkResult]:
        # Anew in place of those that were ended with an earlier run.
        self._start()
        waiting, idle = iter(jobs), list(self._workers)
        with DefaultSelector() as selector:
            try:
                while True:
                    # Each idle helper gets a job before any answer is waited for: they work side by side. One
                    # job each, since a second one in a pipe could not be taken back once a line has failed.
                    while idle and (job := next(waiting, None)) is not None:
                        worker = idle.pop()
                        selector.register(worker.output, EVENT_READ, worker)
                        worker.send(job.to_json())
                    if not selector.get_map():
                        return
                    for key, _ in selector.select():
                        outcomes, is_done = key.data.receive()
                        if is_done:
                            selector.unregister(key.fileobj)
                            idle.append(key.data)
                        yield from outcomes
            except BaseException:
                # Also where the caller goes no further. Without locks another preparer may have published,
                # and the caller continues with its next source: a late answer would be taken for one of that.
                for key in list(selector.get_map().values()):
                    self._workers.remove(key.data)
                    key.data.close()
                raise

    def _start(self) -> None:
        """Start as many helpers as are missing."""
        num_started = len(self._workers)
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker())
        for worker in self._workers[num_started:]:
            worker.send(self._setup)

    def close(self) -> None:
        """Kill the helpers. Their finished jobs have records on the disk."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """One helper process and its two pipes."""

    def __init__(self) -> None:
        # -P: a file of the working directory must not be taken for a module.
        command = [sys.executable, "-P", "-m", _MODULE]
        # A process group of its own: Ctrl-C is for the parent, which decides what it means.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise EvergradError("a helper process of prepare has no pipes")
        self._input, self.output = self._process.stdin, self._process.stdout
        self._rest = b""

    def send(self, value: dict[str, Any]) -> None:
        try:
            self._input.write(json.dumps(value).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> tuple[list[ChunkResult], bool]:
        """The outcomes that have come of the job sent last, and whether it is done.

        Waits for at least a part of one. Raises what the job raised in its helper.
        """
        # Not through a buffer of Python's, in which a line could wait that the selector knows nothing of.
        data = os.read(self.output.fileno(), _PIPE_BYTES)
        if not data:
            raise self._death()
        *lines, self._rest = (self._rest + data).split(b"\n")
        answers = [json.loads(line) for line in lines]
        outcomes = []
        for answer in answers:
            if "outcome" in answer:
                outcomes.append(ChunkResult.from_json(answer["outcome"]))
            elif "problems" in answer:
                raise DataError(*(Problem(**problem) for problem in answer["problems"]))
            elif "os" in answer:
                number, text, name = answer["os"]
                raise OSError(number, text, name or None)
            elif "done" not in answer:
                raise EvergradError(
                    f"a helper process of prepare failed:\n{answer['failure']}"
                )
        return outcomes, bool(answers) and "done" in answers[-1]

    def close(self) -> None:
        """Kill it if it still works, and reap it."""
        self._process.kill()
        # Waited for, or it would stay behind as a process that has ended.
        self._process.wait()
        for pipe in (self._input, self.output):
            # A line may wait in the buffer for a helper that is gone.
            with suppress(BrokenPipeError):
                pipe.close()

    def _death(self) -> EvergradError:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return EvergradError(
                "a helper process of prepare was killed (signal 9), probably for memory. Use "
                "fewer with --workers"
            )
        return EvergradError(
            f"a helper process of prepare ended with status {status}; its own message is above"
        )


def build_pool(
    tokenizer: TextTokenizer, *, workers: int, pending_bytes: int, smallest: int
) -> Pool:
    """A pool for ``pending_bytes`` of work.

    Below ``smallest`` bytes jobs run in this process: a helper's start would take longer than the work.
    """
    return (
        InlinePool(tokenizer)
        if pending_bytes < smallest
        else ProcessPool(tokenizer, workers=workers)
    )

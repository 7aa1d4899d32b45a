"""Runs jobs of ``prepare``: in this process if there is little work, else in one helper process per core."""

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
    """Runs jobs. ``jobs`` is read lazily, so that a job can depend on earlier results."""

    def run(self, jobs: Iterable[Job]) -> Iterator[ChunkResult]:
        """Yield the results in the order in which the jobs finish.

        Raises the DataError or OSError of a job, and EvergradError if a helper process fails.
        """

    def close(self) -> None:
        """Stop the helper processes."""


class InlinePool:
    """Runs every job in this process."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def run(self, jobs: Iterable[Job]) -> Iterator[ChunkResult]:
        for job in jobs:
            yield from execute(job, self._tokenizer)

    def close(self) -> None:
        """Do nothing, because there are no helper processes."""


class ProcessPool:
    """Runs jobs in helper processes, which exchange JSON lines with this process.

    multiprocessing is not used, because its children import the parent's main module (and so torch in a
    training process), and outlive a killed parent. These helpers exit when their input ends, however the
    parent ended.
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
        # Replace helpers that an earlier call has killed.
        self._start()
        waiting, idle = iter(jobs), list(self._workers)
        with DefaultSelector() as selector:
            try:
                while True:
                    # Send a job to each idle helper before waiting for an answer, so that they work in
                    # parallel. Send only one job to each, because a job in a pipe cannot be cancelled after a
                    # line has failed.
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
                # Kill the busy helpers, also if the caller stops iterating: without locks, another process
                # may have published the source. The caller then continues with its next source, and a late
                # answer would be taken for an answer about the next source.
                for key in list(selector.get_map().values()):
                    self._workers.remove(key.data)
                    key.data.close()
                raise

    def _start(self) -> None:
        """Start the missing helpers."""
        num_started = len(self._workers)
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker())
        for worker in self._workers[num_started:]:
            worker.send(self._setup)

    def close(self) -> None:
        """Kill the helpers. Finished jobs have records on disk and are not lost."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """A helper process and its two pipes."""

    def __init__(self) -> None:
        # -P: do not import modules from the working directory.
        command = [sys.executable, "-P", "-m", _MODULE]
        # Use a separate process group, so that Ctrl-C reaches only the parent, which decides what to do.
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
        """Return the received results of the last job, and whether the job is done.

        Waits for at least a part of a line. Raises the exception that the job raised in its helper.
        """
        # Read without a Python buffer, in which a line could wait without the selector detecting it.
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
        """Kill the process and reap it."""
        self._process.kill()
        # Wait for the process, which would otherwise remain as a zombie.
        self._process.wait()
        for pipe in (self._input, self.output):
            # Closing flushes the buffer, which may contain a line for the killed helper.
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
    """Build a pool for ``pending_bytes`` bytes of work.

    Below ``smallest`` bytes, jobs run in this process, because starting a helper would take longer than the
    work.
    """
    return (
        InlinePool(tokenizer)
        if pending_bytes < smallest
        else ProcessPool(tokenizer, workers=workers)
    )

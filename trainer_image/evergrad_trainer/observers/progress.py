"""Display of a run that trains: a bar on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from evergrad_common.text import compact, duration, real, short_count
from evergrad_trainer.base.records import EvaluationRecord, Event, RunInfo, StepRecord
from evergrad_trainer.observers.base import BaseObserver, Observer
from evergrad_trainer.observers.events import describe_event
from evergrad_trainer.observers.live_state import LiveState


def build_progress(
    stream: TextIO, *, every: int, clock: Callable[[], float] = time.monotonic
) -> Observer:
    """Build the bar where ``stream`` is a terminal, else a line every ``every`` steps."""
    if stream.isatty():
        from evergrad_trainer.observers.bar import ProgressBar

        return ProgressBar(stream, clock=clock)
    return ProgressLines(stream, every=every, clock=clock)


def describe_evaluation(record: EvaluationRecord) -> str:
    """Describe an evaluation in one plain line."""
    return (
        f"evaluation step={record.step} set={record.name} loss={real(record.loss)} "
        f"perplexity={compact(record.perplexity)} seconds={record.seconds:.2f}{_metrics(record.metrics)}"
    )


def _metrics(metrics: Mapping[str, float]) -> str:
    """Write further ``key=value`` pairs at the end of a line."""
    return "".join(f" {name}={compact(value)}" for name, value in metrics.items())


class ProgressLines(BaseObserver):
    """Plain lines for pipes, files and ``kubectl logs``: a kind, then key=value pairs; no colours, nothing
    rewritten."""

    def __init__(
        self,
        stream: TextIO,
        *,
        every: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every = every
        self._state = LiveState(clock)

    def run_start(self, info: RunInfo) -> None:
        self._state.start(info)
        if info.takes_over:
            # The line was printed at the first start; the world event that follows names who came or went.
            return
        trained = info.trainable_parameters
        is_part = trained is not None and trained < info.parameters
        part = (
            f"trainable={short_count(trained)} " if is_part and trained is not None else ""
        )
        self._print(
            f"start run={info.name} step={info.start_step}/{info.total_steps} model={info.model} "
            f"parameters={short_count(info.parameters)} {part}processes={info.world_size} "
            f"precision={info.precision} "
            f"parallelism={info.parallelism} {info.unit_read}_per_step={info.tokens_per_step} "
            f"directory={info.run_directory}"
        )
        if info.metrics_address:
            self._print(f"metrics address={info.metrics_address}")

    def step_end(self, record: StepRecord) -> None:
        state = self._state
        state.finish_step(record)
        # The last step is always printed: a log must not end before the run does.
        if record.step % self._every and record.step != state.total_steps:
            return
        used = "" if state.utilisation is None else f" mfu={state.utilisation:.1%}"
        self._print(
            f"step {record.step}/{state.total_steps} loss={real(record.loss)} "
            f"{state.unit_read}/s={state.tokens_per_second:.0f} "
            f"eta={duration(state.remaining_seconds)} learning_rate={compact(record.learning_rate)} "
            f"grad_norm={real(record.grad_norm, 3)}{used}{_metrics(record.metrics)}"
        )

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._state.finish_evaluation(record)
        self._print(describe_evaluation(record))

    def event(self, event: Event) -> None:
        self._state.see(event)
        line = describe_event(event)
        if line is not None:
            self._print(line)

    def _print(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()

"""The catalogue of metrics, as data: what is measured, in which unit, and how it is put together and
compared.

The trainer's exporter and each node's build their series from SERIES, the reference page its tables; files,
report and compare-runs read COLUMNS. A recipe declares its own metrics by :func:`declare`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "evergrad_"
Kind = Literal["gauge", "counter", "histogram"]
Compared = Literal["exactly", "closely", "by request", "told"]
"""How compare-runs takes a column: it must be equal; within the tolerance; only with --exact; it is told, and
counts nothing."""


@dataclass(frozen=True)
class Series:
    """One metric of an endpoint.

    ``labels``: besides ``run``, and ``node`` of a node's own. ``note``: more for the page.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    note: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """Its name in the endpoint's text."""
        return PREFIX + self.name


@dataclass(frozen=True)
class Column:
    """One number of a step, as it stands in its row. ``aggregate``: how the ranks' values become one."""

    name: str
    unit: str
    help: str
    aggregate: str
    compared: Compared | None = None


_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_CHECKPOINT_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

TRAINER: Final[tuple[Series, ...]] = (
    Series(
        "info",
        "gauge",
        "Always 1; facts for joins",
        ("attempt", "model", "precision", "parallelism", "framework_version", "image_version"),
        "`attempt` is the generation.",
    ),
    Series("step", "gauge", "Last finished optimizer step"),
    Series("max_steps", "gauge", "Optimizer steps the run is to reach"),
    Series(
        "steps_total",
        "counter",
        "Optimizer steps this process has finished, repeated ones included",
    ),
    Series(
        "tokens_total", "counter", "Tokens trained on, over all processes of the run together"
    ),
    Series(
        "samples_total", "counter", "Samples trained on, over all processes of the run together"
    ),
    Series(
        "tokens_per_second",
        "gauge",
        "Tokens a second of wall time, over the last minute",
        note="`rate(evergrad_tokens_total[5m])` says the same for any window.",
    ),
    Series(
        "loss",
        "gauge",
        "Nats a valid token: mean of the last 10 steps, or last evaluation",
        ("split", "dataset"),
        '`split="train"` has `dataset=""`; `split="eval"` is of the set named by `dataset`.',
    ),
    Series(
        "eval_metric",
        "gauge",
        "Last value of another evaluation metric",
        ("dataset", "metric"),
        '`metric="perplexity"`, or what the evaluator measures.',
    ),
    Series(
        "task_metric",
        "gauge",
        "What the recipe itself measures, of the last step",
        ("metric",),
        "`pretrain` measures nothing besides its loss.",
    ),
    Series("grad_norm", "gauge", "Global gradient norm of the last step, before clipping"),
    Series("learning_rate", "gauge", "Learning rate of the last step"),
    Series("world_size", "gauge", "Processes that train together"),
    Series(
        "world_changes_total",
        "counter",
        "Times training went on in another world without reading a checkpoint",
        ("cause",),
        "By [cause](#causes).",
    ),
    Series(
        "step_duration_seconds",
        "histogram",
        "Wall time of an optimizer step",
        buckets=_STEP_BUCKETS,
        note="Buckets from 5 ms to 2 min.",
    ),
    Series(
        "step_phase_seconds_total",
        "counter",
        "Wall time since the first step, by its use",
        ("phase",),
        "`data`, `forward_backward`, `comm_wait`, `optimizer`, `checkpoint`, `eval`, `other`.",
    ),
    Series(
        "rank_step_skew_seconds",
        "gauge",
        "How much longer the slowest rank computed than the median one",
        note="Of the last step.",
    ),
    Series("last_step_timestamp_seconds", "gauge", "Unix time of the end of the last step"),
    Series(
        "nonfinite_total",
        "counter",
        "Steps refused because a loss or a gradient was not finite",
        ("what",),
        "`loss` or `grad`.",
    ),
    Series(
        "skipped_steps_total",
        "counter",
        "Steps that made no update",
        ("why",),
        "A `loss` or a gradient (`grad`) was not finite, no token carried a loss (`empty`), or "
        "`spec.training.skipSteps` names them (`requested`).",
    ),
    Series(
        "checkpoint_duration_seconds",
        "histogram",
        "Wall time of a save or load, background work included",
        ("op", "mode"),
        '`op` is `save` or `load`. `mode="sync"`: training waited for all of it; else `async`.',
        buckets=_CHECKPOINT_BUCKETS,
    ),
    Series(
        "checkpoint_blocking_seconds_total", "counter", "Seconds training stood still for saves"
    ),
    Series("checkpoint_size_bytes", "gauge", "Size of the last checkpoint"),
    Series(
        "checkpoint_last_success_timestamp_seconds",
        "gauge",
        "Unix time at which the last checkpoint was published",
    ),
    Series("checkpoint_last_step", "gauge", "Step of the last checkpoint"),
    Series(
        "checkpoint_failures_total",
        "counter",
        "Checkpoint operations that failed",
        ("op", "reason"),
        "Saves by reason (`no_space`, `read_only`, `permission`, `io`, `timeout`, `fenced`, "
        "`invalid`, `peer_lost`, "
        '`other`); checkpoints that did not validate when loading (`op="load"`, `reason="invalid"`).',
    ),
    Series(
        "productive_seconds_total",
        "counter",
        "Seconds in steps that were not trained before",
        note="The numerator of goodput.",
    ),
    Series(
        "lost_seconds_total",
        "counter",
        "All other seconds, by cause",
        ("cause",),
        (
            "`startup`, `restore`, `recompute`, `checkpoint`, `evaluation`, `reconfiguration`, "
            "`downtime`, `other`."
        ),
    ),
    Series(
        "exit_code",
        "gauge",
        "Exit code of the trainer, once it has ended",
        note="Absent before, and again when others go on.",
    ),
)
"""Of the run, where rank 0 is."""

NODE: Final[tuple[Series, ...]] = (
    Series("node_workers", "gauge", "Workers of this node that can train", ("node",)),
    Series("node_generation", "gauge", "Generation this node trained in last", ("node",)),
    Series(
        "node_worker_starts_total",
        "counter",
        "Worker processes this node has started",
        ("node",),
        "More than its workers means that some were replaced.",
    ),
    Series(
        "node_breaks_total",
        "counter",
        "Times a group broke, as this node saw it",
        ("node", "cause"),
        "By [cause](#causes).",
    ),
    Series("script_step", "gauge", "Step of a script, as it reports it", ("node",)),
    Series("script_loss", "gauge", "Loss of a script, as it reports it", ("node",)),
    Series(
        "script_tokens_per_second", "gauge", "Speed of a script, as it reports it", ("node",)
    ),
)
"""Of a node's supervisor."""

COLUMNS: Final[tuple[Column, ...]] = (
    Column("step", "", "optimizer step, from 1", "agreed"),
    Column(
        "generation",
        "",
        (
            "claim on the directory under which it was trained; each start raises it, and so does "
            "each change of the world"
        ),
        "agreed",
        "told",
    ),
    Column("world_size", "", "processes that trained it", "agreed", "told"),
    Column(
        "loss", "nats per valid token", "mean over the whole global batch", "mean", "closely"
    ),
    Column("tokens", "", "of this step, over all processes", "sum", "exactly"),
    Column("valid_tokens", "", "those of them that carry a loss", "sum", "exactly"),
    Column(
        "sample_hash",
        "",
        "16 hex digits: the sum modulo 2⁶⁴ of a hash of each sample's id. Equal hashes, equal samples",
        "sum",
        "exactly",
    ),
    Column("learning_rate", "", "of this update", "agreed", "closely"),
    Column("grad_norm", "", "global, before clipping", "norm", "by request"),
    Column(
        "step_seconds",
        "s",
        "wall time of the step on rank 0, the sum of the next five",
        "rank 0",
    ),
    Column("data_seconds", "s", "waiting for samples", "rank 0"),
    Column("forward_backward_seconds", "s", "computing losses and gradients", "rank 0"),
    Column(
        "communication_seconds",
        "s",
        "waiting for and exchanging with other processes",
        "rank 0",
    ),
    Column("optimizer_seconds", "s", "updating the weights", "rank 0"),
    Column("other_seconds", "s", "what no phase claims", "rank 0"),
    Column(
        "rank_skew_seconds",
        "s",
        "how much longer the slowest rank computed than the median one",
        "maximum less median",
    ),
    Column("time", "Unix s", "end of the step", "rank 0"),
)
"""The columns of metrics.jsonl that every row has and that are numbers, in their order."""

MOST_DECLARED: Final = 32
"""Metrics a recipe may have: each is a series of the endpoint, and a place in what ranks exchange at every
step."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


def declare(metrics: Mapping[str, str]) -> tuple[Column, ...]:
    """The columns of a recipe's own metrics, from their names and what they mean. They are compared like
    losses.

    Raises ValueError that names everything that is wrong with them.
    """
    taken = {column.name for column in COLUMNS} | {
        "skipped",
        "metrics",
        "name",
        "perplexity",
        "seconds",
    }
    wrong = [
        f"{name!r} is no name; use letters, digits and _"
        for name in metrics
        if not _NAME.fullmatch(name)
    ]
    wrong += [
        f"{name!r} is a column of every run; use another name"
        for name in metrics
        if name in taken
    ]
    if len(metrics) > MOST_DECLARED:
        wrong.append(f"there are {len(metrics)}; {MOST_DECLARED} are possible")
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(Column(name, "", text, "mean", "closely") for name, text in metrics.items())


def render_series(series: Iterable[Series]) -> str:
    """A table of the reference page."""
    lines = ["| Metric | Type | Further labels | Meaning |", "|---|---|---|---|"]
    for one in series:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        meaning = f"{one.help}.{' ' if one.note else ''}{one.note}"
        lines.append(
            f"| `{one.exported}` | {one.kind} |{f' {labels}' if labels else ''} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def render_columns() -> str:
    """The table of metrics.jsonl on the page of the run directory."""
    lines = ["| Key | Unit | Over ranks | Meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{one.name}` | {one.unit} | {one.aggregate} | {one.help} |".replace("|  |", "| |")
        for one in COLUMNS
    ]
    return "\n".join(lines) + "\n"


TABLES: Final[Mapping[str, str]] = {
    "trainer": render_series(TRAINER),
    "node": render_series(NODE),
    "columns": render_columns(),
}
"""Tables that pages of the reference have between ``<!-- table: NAME -->`` and ``<!-- end -->``."""


def fill_tables(page: str) -> str:
    """The page with its tables as the catalogue has them now. Raises KeyError for a table that is none."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{TABLES[found[2]]}\n{found[3]}",
        page,
        flags=re.DOTALL,
    )

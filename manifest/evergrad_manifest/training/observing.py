"""Sections that observe a run and do not change its result: printed lines, trackers, profiles and
monitors."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section
from evergrad_manifest.model.fields import fields_of, format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import RECIPES, TRAINING, Every
from evergrad_manifest.training.pretrain import (
    METRICS_OF_ALL,
    check_measured_while_training,
    set_names,
)
from evergrad_manifest.training.steps import Metric
from evergrad_manifest.values.numbers import Count, Real
from evergrad_manifest.values.urls import has_credentials

TRACKERS: Final = f"{TRAINING}.logging.trackers"
PROFILE: Final = f"{TRAINING}.logging.profile"
MONITORS: Final = f"{TRAINING}.monitors"
EARLY: Final = f"{TRAINING}.stop.early"
DEFAULT_PROJECT: Final = "evergrad"
STEP_METRICS: Final = ("loss", "grad_norm")
"""Metrics of every step that are the same on every rank, for every recipe."""

Tag = Annotated[str, Field(min_length=1, max_length=63)]


class Tracker(Section):
    """A tracker of experiments that shows the run; its library is an extra of the trainer."""

    type: Literal["tensorboard", "wandb", "mlflow", "aim"]
    """Library of the tracker."""
    mode: Literal["offline", "online"] = "offline"
    """``offline``: files in the run directory, without a connection. ``online``: to a server. The address and
    key come from the library's own environment variables, or from ``url``."""
    url: str | None = Field(default=None, min_length=1, max_length=253)
    """Server for ``mode: online``. Default: the library's own setting."""
    project: str | None = Field(default=None, min_length=1, max_length=128)
    """Project (wandb) or experiment (mlflow, aim). Default: evergrad."""
    entity: str | None = Field(default=None, min_length=1, max_length=128)
    """Team or user that owns the project. For wandb only."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """Name that the tracker shows. Default: the name of the run."""
    tags: tuple[Tag, ...] = Field(default=(), max_length=16)
    """Tags that the tracker shows."""
    directory: LocalPath | None = Field(default=None, min_length=1)
    """Directory of the tracker's files, in a folder with the run's name. Default: ``trackers/<type>`` of the
    run directory."""


class Profile(Section):
    """Traces of torch's profiler, and the history of device memory, as files of the run directory."""

    steps: Count = Field(default=3, ge=1, le=100)
    """Number of steps in one trace."""
    first_step: Count = Field(default=10, ge=1, le=10**12)
    """First step that is traced. The steps before it are for warm-up."""
    every: Count | None = Field(default=None, ge=1, le=10**12)
    """Steps from the start of one trace to the start of the next. Default: one trace in the run."""
    ranks: Literal["first", "all"] = "first"
    """Processes that write traces. ``first``: rank 0. ``all``: every process, except that a process skips a
    trace if it has made no step before it."""
    memory: bool = False
    """Also record the history of allocations: as a snapshot of an accelerator's memory, and in the trace."""
    max_entries: Count = Field(default=100_000, ge=1, le=10**9)
    """Maximum number of allocations in a snapshot."""
    keep: Count = Field(default=4, ge=1, le=1000)
    """Number of the newest traces of a process that are kept. Older traces are removed."""


class Logging(Section):
    """Lines that are printed, and who else is shown the run."""

    every: Every = Every.model_validate({"steps": 10})
    """How often a line is printed if the output is not a terminal."""
    trackers: tuple[Tracker, ...] = Field(default=(), max_length=4)
    """Trackers of experiments. Each type can occur once."""
    profile: Profile | None = None
    """Traces of some steps."""
    peak_flops: Real | None = Field(default=None, gt=0, le=1e18)
    """Peak floating-point operations per second of one device, for example 989e12, for the computation of
    utilization. Default: from the table of known devices."""


class Monitor(Section):
    """A watch on one metric, looked at after each step or evaluation that has it."""

    type: Literal["collapse", "divergence", "plateau"]
    """Condition of the metric. ``collapse``: it falls too low. ``divergence``: it rises too high.
    ``plateau``: it does not improve."""
    metric: Metric
    """``loss``, ``grad_norm``, a metric of the recipe, or ``<evaluation set>/<metric>``."""
    policy: Literal["warn", "save", "stop"] = "warn"
    """Action when the condition starts. ``warn``: write an event and a line. ``save``: also save. ``stop``:
    also save and stop."""
    window: Count | None = Field(default=None, ge=1, le=100)
    """Number of the newest values whose mean is compared. Default: 20 for divergence, otherwise 1."""
    limit: Real | None = None
    """Bound of the metric: a collapse is below it, and a divergence above. Default: use ``ratio``."""
    ratio: Real | None = Field(default=None, gt=0, le=1e6)
    """For collapse: share of the metric ``of``, or of the metric's first mean (default 0.5). For divergence:
    multiple of the metric's lowest mean (default 2)."""
    of: Metric | None = None
    """Metric to compare with. For collapse only."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller (``min``) or larger (``max``) values are better. For plateau only."""
    patience: Count | None = Field(default=None, ge=1, le=10**9)
    """Number of values without an improvement. For plateau only, and required there."""
    min_delta: Real = Field(default=0.0, ge=0, le=1e6)
    """Smallest change that counts as an improvement. For plateau only."""


_CREDENTIALS_OF: Final = {
    "wandb": "the environment: WANDB_API_KEY",
    "mlflow": "the environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "aim": "the proxy before the server, since aim has none",
}
"""Where to set the credentials of each tracker type that has a server."""


def check_trackers(view: View) -> Iterator[Problem]:
    """Check that each type occurs once, and that keys are set only if they have a meaning."""
    seen: set[str] = set()
    for path, tracker in view.items(TRACKERS):
        type_ = tracker["type"]
        if type_ is UNKNOWN:
            continue
        if type_ in seen:
            what = f"{type_} is listed twice"
            why = "each tracker shows a run once"
            yield Problem(format_path((*path, "type")), what, why, "Remove one of them")
        seen.add(type_)

        files_only = type_ == "tensorboard"
        unused: list[tuple[str, bool, str]] = [
            (
                "mode",
                files_only and tracker["mode"] == "online",
                "it has files, and no server",
            ),
            ("project", files_only, "it has no projects"),
            ("entity", type_ != "wandb", "only wandb has entities"),
            ("url", tracker["mode"] == "offline", "offline there is no connection"),
            (
                "directory",
                tracker["mode"] == "online" and type_ in ("mlflow", "aim"),
                "the server keeps the files",
            ),
        ]
        for key, is_unused, why in unused:
            if is_unused and tracker[key] not in (None, UNKNOWN):
                what = f"has no meaning with type {type_} and mode {tracker['mode']}"
                yield Problem(format_path((*path, key)), what, why, "Remove it")

        # The file is copied into run.json, and every tracker shows it.
        url = tracker["url"]
        is_online = type_ in _CREDENTIALS_OF and tracker["mode"] != "offline"
        if is_online and isinstance(url, str) and has_credentials(url):
            what, why = (
                "has a user or a password",
                "anyone who can read the run could read them",
            )
            remedy = f"Remove them; they belong in {_CREDENTIALS_OF[type_]}"
            yield Problem(format_path((*path, "url")), what, why, remedy)


def check_profile(view: View) -> Iterator[Problem]:
    """Check that traces do not overlap, and that every tracing process is notified before a trace begins."""
    if view.get(f"{PROFILE}.ranks") == "all" and view.get(f"{PROFILE}.firstStep") == 1:
        why = "only the first process is notified before its first step, and the others follow its steps"
        remedy = "Raise it to at least 2, or set ranks: first"
        yield Problem(
            f"{PROFILE}.firstStep", "1 cannot be traced by all ranks", why, remedy
        )
    found = view.known(f"{PROFILE}.steps", f"{PROFILE}.every")
    if found is None or None in found:
        return
    steps, every = found
    if every <= steps:
        what = f"{every} is not above the {steps} steps of a trace"
        remedy = f"Raise it to at least {steps + 1}, or leave it out for one trace"
        yield Problem(f"{PROFILE}.every", what, "the next one would begin in it", remedy)


_WITHOUT_METRICS: Final = ("pretrain",)
"""Recipes that measure only losses."""
_KEYS_OF: Final = {
    "collapse": ("limit", "ratio", "of"),
    "divergence": ("limit", "ratio"),
    "plateau": ("mode", "patience", "minDelta"),
}
"""Keys of a monitor that have a meaning only for some types, by type. All types have the other keys."""


def check_monitors(view: View) -> Iterator[Problem]:
    """Check that a monitor has the keys of its type, and a metric that this run measures."""
    seen: set[tuple[str, str]] = set()
    for path, monitor in view.items(MONITORS):
        type_, metric = monitor["type"], monitor["metric"]
        if type_ is UNKNOWN:
            continue
        yield from _check_keys(view, path, monitor)
        # The checkpoint identifies the state of a monitor by type and metric.
        if metric is not UNKNOWN:
            if (type_, metric) in seen:
                what = f"a {type_} of {metric} is already watched"
                yield Problem(
                    format_path((*path, "metric")), what, "", "Remove one of them"
                )
            seen.add((type_, metric))
            yield from _check_metric(view, format_path((*path, "metric")), metric)
        yield from _check_comparison(view, path, monitor)


def _check_keys(
    view: View, path: FieldPath, monitor: Mapping[str, Any]
) -> Iterator[Problem]:
    """Check that a monitor has the keys of its type, and no others."""
    type_ = monitor["type"]
    of_others = {key for keys in _KEYS_OF.values() for key in keys} - set(_KEYS_OF[type_])
    for key in sorted(of_others):
        default = fields_of(Monitor)[key].default
        if view.raw(*path, key) not in (None, default):
            where = format_path((*path, key))
            meant = [name for name, keys in _KEYS_OF.items() if key in keys]
            remedy = f"Remove it, or set type: {meant[0]}"
            yield Problem(where, f"has no meaning with type {type_}", "", remedy)
    if type_ == "plateau" and view.raw(*path, "patience") is None:
        where = format_path((*path, "patience"))
        why = "without it the monitor would never act"
        yield Problem(where, "missing; it has no default", why, "Add it, such as 5")
    if monitor["limit"] is not None:
        for key in ("ratio", "of"):
            if monitor[key] not in (None, UNKNOWN):
                why = "the limit is a value, and is not compared with another one"
                where = format_path((*path, key))
                yield Problem(where, "has no meaning together with limit", why, "Remove it")


def _check_comparison(
    view: View, path: FieldPath, monitor: Mapping[str, Any]
) -> Iterator[Problem]:
    """Check that the monitor's two metrics are known at the same time."""
    metric = monitor["metric"]
    other, where = monitor["of"], format_path((*path, "of"))
    if other in (None, UNKNOWN):
        return
    if metric is not UNKNOWN and metric.rpartition("/")[0] != other.rpartition("/")[0]:
        # The monitor compares the two metrics at the same time, and they would never be measured
        # together.
        what = f"{other!r} and {metric!r} are never known together"
        why = "one is of each step, the other of an evaluation set"
        if "/" in metric and "/" in other:
            why = "they are of two evaluation sets"
        yield Problem(where, what, why, "Compare two of one set, or two of each step")
    else:
        yield from _check_metric(view, where, other)


def check_early_stop(view: View) -> Iterator[Problem]:
    """Check that an early stop follows a metric that this run measures."""
    metric = view.get(f"{EARLY}.metric")
    if view.is_given(EARLY) and metric not in (None, UNKNOWN):
        yield from _check_metric(view, f"{EARLY}.metric", metric)


def _check_metric(view: View, where: str, metric: str) -> Iterator[Problem]:
    """Check that the run measures the metric. Otherwise the user would notice too late that the monitor never
    acts."""
    is_of_set = "/" in metric
    recipe = view.get(f"{TRAINING}.recipe")
    if recipe not in _WITHOUT_METRICS:
        # Only the other recipes and tasks define their metrics, which are checked when they start. Check here
        # only that their sets are evaluated in time; an observer of a custom task may request an evaluation
        # itself.
        sets = view.items(f"{TRAINING}.evaluation.sets")
        is_listed = any(item["name"] == metric.partition("/")[0] for _, item in sets)
        if is_of_set and (recipe in RECIPES or is_listed):
            yield from check_measured_while_training(view, where, metric)
        return
    if (names := set_names(view)) is None:
        return
    known = [*STEP_METRICS]
    known += [f"{name}/{what}" for name in names for what in METRICS_OF_ALL]
    if metric not in known:
        near = nearest(metric, known)
        hint = f"did you mean `{near}`? " if near else ""
        why = f"{hint}Known here: {', '.join(known)}"
        remedy = "" if near else "Write one of them, or add an evaluation set first"
        yield Problem(where, f"{metric!r} is not a metric of this run", why, remedy)
    elif is_of_set:
        yield from check_measured_while_training(view, where, metric)


RULES: Final = (check_trackers, check_profile, check_monitors, check_early_stop)

"""The recipe ``pretrain``: a causal language model, its tokenizer, and its text."""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section, Switch
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import (
    LENGTH_WITHOUT_DATA,
    OF_TEXT,
    PREFERENCE,
    RECIPES,
    TRAINING,
    Every,
    Meaningless,
    meaningless_in,
)
from evergrad_manifest.training.model import MODEL as _MODEL
from evergrad_manifest.training.model import RULES as RULES_OF_MODEL
from evergrad_manifest.training.preference import METRICS as METRICS_OF_PAIRS
from evergrad_manifest.training.sft import GENERATED, NUMBERS, Generation
from evergrad_manifest.training.two_stage_kl import MEASURED as KL_MEASURED
from evergrad_manifest.training.two_stage_kl import RECIPE as KL_RECIPE
from evergrad_manifest.training.two_stage_kl import STAGE_SETS
from evergrad_manifest.values.numbers import Count, Fraction, Real, SamplesOrShare, show

NAME_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
HELD_OUT: Final = "heldOut"
"""Name of the evaluation set that ``data.heldOut`` creates, except for recipes in HELD_OUT_SETS."""
HELD_OUT_SETS: Final = {KL_RECIPE: STAGE_SETS}
MEASURED: Final = {KL_RECIPE: KL_MEASURED, PREFERENCE: tuple(METRICS_OF_PAIRS)}
"""Metrics of a recipe on each evaluation set, in addition to METRICS_OF_ALL."""
BYTE_VOCABULARY: Final = 257
TEXT_TYPES: Final = ("jsonl", "text", "parquet")
"""Types of sources whose documents are tokenized."""
_SOURCES: Final = f"{TRAINING}.data.sources"
_HELD_OUT: Final = f"{TRAINING}.data.heldOut"
_EVALUATION: Final = f"{TRAINING}.evaluation"
_PODS: Final = "spec.evaluation"
METRICS_OF_ALL: Final = ("loss", "perplexity")
"""Metrics that every evaluation set has."""
_LOSSES_OF_STEPS: Final = (
    "loss",
    "train/loss",
    "train_loss",
    "training/loss",
    "training_loss",
)
"""Names for the loss of a step in other trainers and in trackers."""


def check_required(view: View) -> Iterator[Problem]:
    """Check the required sections of a named recipe: a model, and usually text. A custom task may need
    neither."""
    recipe = view.get(f"{TRAINING}.recipe")
    if recipe not in RECIPES or not isinstance(view.raw("spec", "training"), Mapping):
        return
    # Check this here and not in the models, because a custom task uses the same models.
    needed = []
    # A run that starts from given weights uses their model, unless the file describes a model.
    if not view.is_given(f"{TRAINING}.initFrom"):
        needed.append(
            ("model", "the model: exactly one of a configuration and a directory")
        )
    if recipe in OF_TEXT:
        needed.append(("data", "the data to train on"))
    for key, meaning in needed:
        if not view.is_given(f"{TRAINING}.{key}"):
            why = "it has no default"
            yield Problem(f"{TRAINING}.{key}", "missing", why, f"Add `{key}` ({meaning})")


def check_vocabulary(view: View) -> Iterator[Problem]:
    """Check that the table of a model that is configured here has a row for each id of the byte tokenizer."""
    config = view.get(f"{_MODEL}.config")
    if not isinstance(config, Mapping):
        return
    # With a smaller table, the first byte without a row would fail in the middle of a step.
    size = config.get("vocab_size")
    reads_text = any(
        item["type"] in TEXT_TYPES for _, item in view.items(f"{TRAINING}.data.sources")
    )
    uses_bytes = (
        view.get(f"{TRAINING}.tokenizer") is not UNKNOWN
        and view.get(f"{TRAINING}.tokenizer.type") == "byte"
    )
    if (
        not isinstance(size, int)
        or isinstance(size, bool)
        or size >= BYTE_VOCABULARY
        or not (reads_text and uses_bytes)
    ):
        return
    why = f"the byte tokenizer has {BYTE_VOCABULARY} ids"
    remedy = f"Raise it to at least {BYTE_VOCABULARY}, or leave it out"
    yield Problem(f"{_MODEL}.config.vocab_size", f"{show(size)} is too small", why, remedy)


class Source(Section):
    """One file of samples, or several that are read one after the other."""

    name: str = Field(min_length=1, max_length=63, pattern=NAME_PATTERN)
    """Name of the source. It must be unique among all sources, ignoring case. It appears in sample ids and
    messages."""
    type: Literal["jsonl", "text", "parquet", "tokens"] = "jsonl"
    """``jsonl``: each line is a JSON object with a text. ``text``: plain UTF-8. ``parquet``: a column of
    texts. ``tokens``: flat files of little-endian token ids."""
    path: LocalPath = Field(min_length=1)
    """A file, a folder or a pattern (``*.jsonl``). For ``evergrad run`` it is relative to the manifest. On a
    cluster it is an absolute path in the pod."""
    weight: Real = Field(default=1.0, gt=0, le=1e9)
    """Share of the samples that come from this source, relative to the other weights. With
    ``mixing: passes``, the number of passes over the source in an epoch."""
    samples: SamplesOrShare | None = Field(default=None, gt=0)
    """Number of samples (``5k``) or share (``10%``) of the source to use, chosen by the seed. Default:
    all."""
    text_field: str = Field(default="text", min_length=1)
    """Key of the text in each object, or the column of texts. For jsonl and parquet only."""
    document: Literal["file", "line"] = "file"
    """Whether each file or each line is a document. For text only."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the token ids. For tokens only."""


class HeldOut(Section):
    """Documents of the training sources kept for evaluation, chosen by the seed. Exactly one of both."""

    fraction: Fraction | None = Field(default=None, gt=0, lt=1)
    """Share of the documents of each source. For a tokens source, the share of its tokens, taken from its
    end."""
    count: Count | None = Field(default=None, ge=1)
    """Number of documents of each source. Not for tokens sources."""


class Data(Section):
    """Data to train on."""

    sources: tuple[Source, ...] = Field(min_length=1, max_length=64)
    """Sources of the samples, mixed by weight."""
    sequence_length: Count = Field(ge=8, le=2**20)
    """Tokens in each sample, S: the window of the model, at most its ``max_position_embeddings``."""
    packing: Literal["concatenate", "documents", "none"] = "concatenate"
    """How documents fill a sample. ``concatenate``: one after the other, and each document attends to those
    before it. ``documents``: the same, but no document attends to another. ``none``: one row in each sample.
    For rows (sft) the default is ``documents``, and ``concatenate`` is refused."""
    mixing: Literal["shares", "passes"] = "shares"
    """Meaning of the weights. ``shares``: shares of the samples. ``passes``: exact numbers of passes over
    each source in an epoch, for example 2 for twice."""
    overfit_first_batch: Switch = False
    """Train on the samples of the first step again and again, to test whether the model can learn them."""
    held_out: HeldOut | None = None
    """Evaluate on a part of the training sources, which is never trained on."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """What happens if a line, row or file has no valid text (not a JSON object, or not UTF-8). ``refuse``:
    the run stops. ``skip``: the item is counted and left out."""
    prepared_directory: LocalPath | None = None
    """Directory of the prepared token files. Default: ``.prepared`` next to the run directory."""


NO_DATA: Final = Data.model_construct(
    set(), sources=(), sequence_length=LENGTH_WITHOUT_DATA
)
"""``data`` of a task that prepares its data itself. It is built without validation, because a source is
required."""

OF_SOURCES: Final = (
    Meaningless("textField", "type", ("text", "tokens"), "Remove it, or set type: jsonl"),
    Meaningless(
        "document", "type", ("jsonl", "parquet", "tokens"), "Remove it, or set type: text"
    ),
    Meaningless("dtype", "type", TEXT_TYPES, "Remove it, or set type: tokens"),
)


def check_source_keys(view: View) -> Iterator[Problem]:
    """Check for keys of a source that would silently have no effect."""
    for where in (_SOURCES, f"{_EVALUATION}.sources"):
        for path, item in view.items(where):
            yield from meaningless_in(view, path, item, OF_SOURCES)

    # EvaluationSource has these keys only so that they are refused with this message and not as unknown keys.
    for path, _ in view.items(f"{_EVALUATION}.sources"):
        for key, remedy in (
            ("weight", "Remove it"),
            ("samples", "Use evaluation.samples, or `samples` under evaluation.sets"),
        ):
            if view.raw(*path, key) is not None:
                what = "has no meaning for an evaluation source"
                why = "a file that is only evaluated on is read whole"
                yield Problem(format_path((*path, key)), what, why, remedy)


def check_source_names(view: View) -> Iterator[Problem]:
    """Check that names are unique over training and evaluation sources, because both appear in sample ids,
    files and metrics."""
    # Ignore case: names become file names, and some file systems ignore case.
    first: dict[str, tuple[str, str]] = {}
    for where in (_SOURCES, f"{_EVALUATION}.sources"):
        for path, item in view.items(where):
            name = item["name"]
            if name is UNKNOWN:
                continue
            here = format_path((*path, "name"))
            if name.casefold() == HELD_OUT.casefold() and (
                where == _SOURCES or view.is_given(_HELD_OUT)
            ):
                why = "it is the name of the evaluation set that data.heldOut makes"
                yield Problem(here, f"{name!r} is reserved", why, "Rename the source")
            elif name.casefold() in first:
                place, other = first[name.casefold()]
                same = (
                    "is also" if name == other else f"differs only in case from {other!r},"
                )
                why = "names of sources are unique, whatever the case of their letters"
                yield Problem(
                    here, f"{name!r} {same} the name of {place}", why, "Rename one of them"
                )
            else:
                first[name.casefold()] = (format_path(path), name)


def check_held_out(view: View) -> Iterator[Problem]:
    """Check that exactly one of fraction and count is set. A flat file of tokens has no documents to
    count."""
    if view.get(_HELD_OUT) is UNKNOWN or not view.is_given(_HELD_OUT):
        return
    # Check this here and not in the model: a section with two optional keys does not explain that one is
    # required.
    given = [name for name in ("fraction", "count") if view.is_given(f"{_HELD_OUT}.{name}")]
    if not given:
        yield Problem(
            _HELD_OUT,
            "has no size",
            "one of fraction and count is needed",
            "Add one, such as `fraction: 1%`",
        )
    if len(given) == 2:
        yield Problem(
            _HELD_OUT,
            "fraction and count are both set",
            "it is exactly one of them",
            "Remove one of them",
        )

    # A flat file has no document boundaries, so only a share of its tokens can be held out.
    flat = [
        format_path(path) for path, item in view.items(_SOURCES) if item["type"] == "tokens"
    ]
    if "count" in given and flat:
        why = f"{flat[0]} is a flat file of tokens, which has no documents to count"
        yield Problem(
            f"{_HELD_OUT}.count", "cannot be used here", why, "Use heldOut.fraction"
        )


class EvaluationSource(Source):
    """A file that is only evaluated on."""

    weight: Real = Field(default=1.0, gt=0, le=1e9)
    """Refused, because a file that is only evaluated on is read completely."""
    samples: SamplesOrShare | None = Field(default=None, gt=0)
    """Refused. Use ``evaluation.samples`` instead."""


class EvaluationSetting(Section):
    """Settings that differ for one evaluation set."""

    name: str = Field(min_length=1, max_length=128)
    """Name of the set: ``heldOut``, a source of ``evaluation.sources``, or an evaluator of your own task."""
    every: Every | None = None
    """How often the set is evaluated while training. Default: as ``evaluation.every``. It is always evaluated
    at the end."""
    samples: Count | None = Field(default=None, ge=1)
    """Maximum number of samples of the set, the same samples each time. Default: as
    ``evaluation.samples``."""
    while_training: Switch | None = None
    """Whether the run evaluates the set itself. If false, only ``evergrad evaluate`` does. Default: true, and
    false with ``spec.evaluation``."""


class Evaluation(Section):
    """Loss on text that is not trained on."""

    every: Every | None = None
    """How often the run evaluates while training. Default: only at the end."""
    at_start: Switch = False
    """Also evaluate before the first step."""
    sources: tuple[EvaluationSource, ...] = Field(default=(), max_length=16)
    """Separate files to evaluate on, each a named set. ``heldOut`` is the name of the split that
    ``data.heldOut`` makes."""
    samples: Count | None = Field(default=None, ge=1)
    """Maximum number of samples of each set, the same samples each time. Default: all."""
    generation: Generation | None = None
    """Also generate from the prompts of each set (sft), and measure the parse rate and the RMSE of the
    numbers."""
    save_first: Switch = False
    """Whether the run saves before each evaluation, so that a kill during a long evaluation loses no step."""
    sets: tuple[EvaluationSetting, ...] = Field(default=(), max_length=32)
    """Interval and size of single sets, if they differ from ``evaluation.every`` and
    ``evaluation.samples``."""


def check_evaluation(view: View) -> Iterator[Problem]:
    """Check that there is data to evaluate on if settings of the evaluation are set."""
    # A task that reads no text may have evaluators that need neither sources nor held-out documents.
    has_sources = view.raw("spec", "training", "evaluation", "sources") not in (None, [])
    if view.get(f"{TRAINING}.recipe") not in OF_TEXT:
        return
    if view.get(_EVALUATION) is UNKNOWN or has_sources or view.is_given(_HELD_OUT):
        return
    for key in ("every", "atStart", "samples", "saveFirst", "sets"):
        if view.is_given(f"{_EVALUATION}.{key}") and view.get(
            f"{_EVALUATION}.{key}"
        ) not in (
            False,
            (),
            [],
        ):
            why = "neither evaluation.sources nor data.heldOut is set"
            remedy = (
                "Add data.heldOut (such as `fraction: 1%`) or a source under "
                "evaluation.sources, or remove this"
            )
            yield Problem(
                f"{_EVALUATION}.{key}", "there is nothing to evaluate on", why, remedy
            )


def check_sets(view: View) -> Iterator[Problem]:
    """Check that each entry of ``evaluation.sets`` changes a setting of one existing set."""
    names, first = set_names(view), dict[str, str]()
    # The default if the file does not set ``whileTraining``.
    default = not view.is_given(_PODS)
    for path, item in view.items(f"{_EVALUATION}.sets"):
        name, here = item["name"], format_path((*path, "name"))
        is_inline = item["whileTraining"]
        is_default = is_inline is None or is_inline is default
        if item["every"] is None and item["samples"] is None and is_default:
            other = str(not default).lower()
            remedy = f"Add every, samples or `whileTraining: {other}`, or remove it"
            yield Problem(
                format_path(path), "changes nothing", "it has only a name", remedy
            )
        if name is UNKNOWN:
            continue
        if name in first:
            why = f"it is also the name of {first[name]}"
            yield Problem(here, f"{name!r} is named twice", why, "Join the two")
        first.setdefault(name, format_path(path))

        # If there are no sets, another rule reports the whole section.
        if names and name not in names:
            near, known = nearest(name, names), f"Known here: {', '.join(names)}"
            why = f"did you mean `{near}`? {known}" if near else "no set has this name"
            remedy = "" if near else known
            yield Problem(
                here, f"{name!r} is not an evaluation set of this run", why, remedy
            )


def check_evaluated_by_pods(view: View) -> Iterator[Problem]:
    """With ``spec.evaluation``, check that there is data to evaluate on, and refuse settings of evaluations
    that the run does not make."""
    if not view.is_given(_PODS) or view.get(_EVALUATION) is UNKNOWN:
        return
    has_sources = view.raw("spec", "training", "evaluation", "sources") not in (None, [])
    is_text = view.get(f"{TRAINING}.recipe") in OF_TEXT
    if is_text and not has_sources and not view.is_given(_HELD_OUT):
        why = "neither evaluation.sources nor data.heldOut is set"
        remedy = "Add data.heldOut (such as `fraction: 1%`) or a source, or remove spec.evaluation"
        yield Problem(_PODS, "there is nothing to evaluate on", why, remedy)
        return

    why, instead = (
        "with spec.evaluation pods evaluate each checkpoint",
        "`whileTraining: true`",
    )
    sets = view.items(f"{_EVALUATION}.sets")
    for path, item in sets:
        if item["every"] is not None and item["whileTraining"] in (None, False):
            here = format_path((*path, "every"))
            yield Problem(
                here, "has no effect", why, f"Add {instead} to this set, or remove it"
            )
    if any(item["whileTraining"] in (True, UNKNOWN) for _, item in sets):
        return
    for key in ("every", "atStart", "saveFirst"):
        found = view.get(f"{_EVALUATION}.{key}")
        if view.is_given(f"{_EVALUATION}.{key}") and found not in (None, False, UNKNOWN):
            remedy = f"Remove it, or add a set with {instead} to evaluation.sets"
            yield Problem(f"{_EVALUATION}.{key}", "has no effect", why, remedy)


def set_names(view: View) -> list[str] | None:
    """Return the names of all evaluation sets; None if the file alone does not define them."""
    sources = view.items(f"{_EVALUATION}.sources")
    names = [item["name"] for _, item in sources]
    # If a set has no valid name, the user may mean this set. Only a task that prepares its own data defines
    # its sets.
    recipe = view.get(f"{TRAINING}.recipe")
    is_known = UNKNOWN not in names and view.get(f"{_EVALUATION}.sources") is not UNKNOWN
    if not is_known or recipe not in OF_TEXT:
        return None
    if view.is_given(_HELD_OUT):
        names += HELD_OUT_SETS.get(recipe, (HELD_OUT,))
    if view.is_given(f"{_EVALUATION}.generation"):
        names += [f"{name}{GENERATED}" for name in names]
    return names


def check_measured_while_training(view: View, where: str, metric: str) -> Iterator[Problem]:
    """Check that the run evaluates the set of ``metric`` while training, not only at its end. ``where``: the
    field that uses the metric."""
    name = metric.partition("/")[0]
    own = [item for _, item in view.items(f"{_EVALUATION}.sets") if item["name"] == name]
    is_left_out = any(item["whileTraining"] is False for item in own)
    if view.is_given(_PODS) and not any(
        item["whileTraining"] in (True, UNKNOWN) for item in own
    ):
        is_left_out = True
    has_cadence = any(item["every"] is not None for item in own)
    if (
        not is_left_out
        and view.get(_EVALUATION) is not UNKNOWN
        and not view.is_given(f"{_EVALUATION}.every")
        and not has_cadence
    ):
        follower = where.removeprefix(f"{TRAINING}.").removesuffix(".metric")
        yield Problem(
            f"{_EVALUATION}.every",
            f"missing, and {follower} needs it",
            "without it the metric is only known at the end",
            "Add it, such as `every: {steps: 200}`",
        )
    if is_left_out:
        why = f"{name} is not evaluated while training"
        remedy = (
            "Choose another metric, or let the run evaluate that set: `whileTraining: true` in "
            "evaluation.sets"
        )
        yield Problem(where, f"{metric!r} is never known", why, remedy)


def check_best(view: View) -> Iterator[Problem]:
    """Check that the best checkpoint uses a metric that is measured while training."""
    # With a metric that is never measured, no checkpoint would be kept, which the user would notice only
    # after the run.
    path = f"{TRAINING}.checkpoint.best"
    metric = view.get(f"{path}.metric")
    if not view.is_given(path) or metric is UNKNOWN or metric is None:
        return
    yield from check_measured_while_training(view, f"{path}.metric", metric)

    if (names := set_names(view)) is None:
        return
    metrics = [f"{name}/{kind}" for name in names for kind in METRICS_OF_ALL]
    own = MEASURED.get(view.get(f"{TRAINING}.recipe"), ())
    metrics += [f"{name}/{kind}" for name in names for kind in own]
    if view.is_given(f"{_EVALUATION}.generation"):
        generated = [name for name in names if name.endswith(GENERATED)]
        metrics += [f"{name}/{number}" for name in generated for number in NUMBERS]
    if metric not in metrics:
        near = nearest(metric, metrics)
        known = (
            f"Known here: {', '.join(metrics)}"
            if metrics
            else "Add an evaluation set first: evaluation.sources or data.heldOut"
        )
        why = (
            f"did you mean `{near}`? {known}"
            if near
            else "it is the name of an evaluation set followed by /loss or /perplexity"
        )
        if metric in _LOSSES_OF_STEPS:
            near = None
            why = "the loss of a step is that of its own samples alone, so that chance would choose"
        yield Problem(
            f"{path}.metric",
            f"{metric!r} is not a metric of this run",
            why,
            "" if near else known,
        )


RULES: Final = (
    check_required,
    *RULES_OF_MODEL,
    check_vocabulary,
    check_source_keys,
    check_source_names,
    check_held_out,
    check_evaluation,
    check_sets,
    check_evaluated_by_pods,
    check_best,
)

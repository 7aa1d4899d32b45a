"""What the fields of the recipe must satisfy together: horizon, batching, schedule, model, tokenizer,
runtime."""

import re
from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any, Final

from evergrad_manifest.derive import check_schedule, check_stop, steps_for_tokens
from evergrad_manifest.errors import Problem
from evergrad_manifest.fields import FieldPath, format_path
from evergrad_manifest.reading.numbers import show
from evergrad_manifest.reading.problems import nearest
from evergrad_manifest.reading.view import UNKNOWN, View
from evergrad_manifest.training import RECIPES

TRAINING: Final = "spec.training"
_HORIZON = f"{TRAINING}.horizon"
_GLOBAL = f"{TRAINING}.batching.globalBatchSize"
_MICRO = f"{TRAINING}.batching.microBatchSize"
_LENGTH = f"{TRAINING}.data.sequenceLength"
_SCHEDULE = f"{TRAINING}.schedule"
_MODEL = f"{TRAINING}.model"
_REMOTE_CODE = ("auto_map", "trust_remote_code", "custom_pipelines")
BYTE_VOCABULARY: Final = 257
_FILE_NAME: Final = re.compile(r"([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py", re.ASCII)


def check_overrides(view: View) -> Iterator[Problem]:
    """Each override replaces something, from a step within the run that lies behind the one before it."""
    total, last = total_steps_of(view), 0
    for path, item in view.items(f"{TRAINING}.overrides"):
        first, here = item["fromStep"], format_path((*path, "fromStep"))
        if item["learningRate"] is None and item["clipNorm"] is None:
            remedy = "Add learningRate or clipNorm, or remove it; steps are skipped by training.skipSteps"
            yield Problem(format_path(path), "replaces nothing", "it has only a step", remedy)
        if first is UNKNOWN:
            continue
        if first <= last:
            what = f"{first} does not lie behind {last}, the step of the override before"
            yield Problem(
                here,
                what,
                "the order says which one holds",
                "Sort them, or join those of one step",
            )
        elif total is not None and first > total:
            why, remedy = (
                "the run ends before that step",
                f"Lower it to at most {total}, or remove it",
            )
            yield Problem(here, f"{first} is beyond the horizon of {total} steps", why, remedy)
        last = max(last, first)


def check_options(view: View) -> Iterator[Problem]:
    """A recipe that has a name has fields of its own instead of options."""
    recipe, options = view.get(f"{TRAINING}.recipe"), view.get(f"{TRAINING}.options")
    if recipe in RECIPES and options is not UNKNOWN and options:
        what = f"have no meaning with recipe {recipe}"
        why = "they are those of a task of your own"
        yield Problem(
            f"{TRAINING}.options", what, why, "Remove them, or set recipe: module:attr"
        )


def check_files(view: View) -> Iterator[Problem]:
    """Files are those of a task of the user's own, and lie below one folder."""
    recipe, files = view.get(f"{TRAINING}.recipe"), view.get(f"{TRAINING}.files")
    if not isinstance(files, Mapping) or not files:
        return
    if recipe in RECIPES:
        what = f"have no meaning with recipe {recipe}"
        why = "they are those of a task of your own"
        yield Problem(f"{TRAINING}.files", what, why, "Remove them, or set recipe: module:attr")
    for name in files:
        if not _FILE_NAME.fullmatch(str(name)):
            why = (
                "a name is a relative path of a Python module, such as task.py or parts/loss.py"
            )
            yield Problem(
                f"{TRAINING}.files", f"{show(name)} cannot be a file's name", why, "Rename it"
            )
    if recipe not in (*RECIPES, UNKNOWN):
        stem = recipe.partition(":")[0].replace(".", "/")
        if not {f"{stem}.py", f"{stem}/__init__.py"} & {*files}:
            remedy = "Add it, or correct the name of the module"
            yield Problem(f"{TRAINING}.files", f"{stem}.py is not among the files", "", remedy)


def check_horizon(view: View) -> Iterator[Problem]:
    """Exactly one of steps, epochs and tokens."""
    if view.get(_HORIZON) is UNKNOWN:
        return
    given = [
        name for name in ("steps", "epochs", "tokens") if view.is_given(f"{_HORIZON}.{name}")
    ]
    if not given:
        yield Problem(
            _HORIZON,
            "has no length",
            "one of steps, epochs and tokens is needed",
            "Add one of them",
        )
    elif len(given) > 1:
        names = " and ".join((", ".join(given[:-1]), given[-1]))
        verb = "both" if len(given) == 2 else "all"
        yield Problem(
            _HORIZON,
            f"{names} are {verb} set",
            "the horizon is exactly one of them",
            "Keep one, remove the rest",
        )


def check_batching(view: View) -> Iterator[Problem]:
    """A step is cut into micro-batches of equal size."""
    if (found := view.known(_GLOBAL, _MICRO)) is None:
        return
    whole, micro = found
    if micro > whole:
        remedy = f"Lower it to at most {whole}, or raise globalBatchSize"
        yield Problem(
            _MICRO,
            f"{micro} is larger than globalBatchSize {whole}",
            "a micro-batch is a part of a step",
            remedy,
        )
    elif whole % micro:
        below, above = nearest_divisors(whole, micro)
        remedy = (
            f"Use a globalBatchSize of {whole - whole % micro} or {whole - whole % micro + micro}, "
            f"or a microBatchSize of {below} or {above}"
        )
        why = "a step is cut into micro-batches of equal size"
        yield Problem(
            _GLOBAL, f"{whole} is not divisible by microBatchSize {micro}", why, remedy
        )


def nearest_divisors(number: int, near: int) -> tuple[int, int]:
    """The largest divisor of ``number`` up to ``near`` and the smallest from ``near`` on, for near in
    1..number."""
    divisors = divisors_of(number)
    return max(d for d in divisors if d <= near), min(d for d in divisors if d >= near)


def divisors_of(number: int) -> set[int]:
    """All divisors of ``number`` ≥ 1, in O(√number)."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}


def slots_of(view: View) -> tuple[int, int, int] | None:
    """(M, G, b) where they are known and M is whole; a script has no slots."""
    if (
        view.get(TRAINING) is None
        or (found := view.known(_GLOBAL, _MICRO)) is None
        or found[0] % found[1]
    ):
        return None
    whole, micro = found
    return whole // micro, whole, micro


def total_steps_of(view: View) -> int | None:
    """Steps of the whole run where they do not depend on the data."""
    given = [
        name for name in ("steps", "epochs", "tokens") if view.is_given(f"{_HORIZON}.{name}")
    ]
    if given == ["steps"]:
        steps = view.get(f"{_HORIZON}.steps")
        return None if steps is UNKNOWN else int(steps)
    if (
        given == ["tokens"]
        and (found := view.known(f"{_HORIZON}.tokens", _GLOBAL, _LENGTH)) is not None
    ):
        return steps_for_tokens(found[0], samples=found[1], length=found[2])
    return None


def check_schedule_fits(view: View) -> Iterator[Problem]:
    """Warm-up and decay lie within the horizon, and the stop step too."""
    total = total_steps_of(view)
    if (
        found := view.known(f"{_SCHEDULE}.type", f"{_SCHEDULE}.warmup", f"{_SCHEDULE}.decay")
    ) is not None:
        kind, warmup, decay = found
        decay = decay if kind == "wsd" else 0
        both_are_shares = isinstance(warmup, float) and isinstance(decay, float)
        if total is not None:
            yield from check_schedule(warmup, decay, total=total)
        elif both_are_shares and check_schedule(warmup, decay, total=100):
            what = (
                f"the warm-up of {warmup * 100:g}% and the final decay of {decay * 100:g}% are more "
                "than the whole horizon"
            )
            yield Problem(f"{_SCHEDULE}.warmup", what, "", "Shorten warmup or decay")
    after_step = view.get(f"{TRAINING}.stop.afterStep")
    if total is not None and after_step is not UNKNOWN:
        yield from check_stop(after_step, total=total)


def check_model(view: View) -> Iterator[Problem]:
    """Exactly one of configuration and path; a configuration names its type and runs no foreign code."""
    if view.get(_MODEL) is UNKNOWN:
        return
    given = [name for name in ("config", "path") if view.is_given(f"{_MODEL}.{name}")]
    if not given:
        yield Problem(
            _MODEL, "names no model", "one of config and path is needed", "Add one of them"
        )
    if len(given) == 2:
        yield Problem(
            _MODEL,
            "config and path are both set",
            "a model is exactly one of them",
            "Remove one of them",
        )
    config = view.get(f"{_MODEL}.config")
    if isinstance(config, Mapping):
        yield from _check_model_type(config)
        yield from _check_no_remote_code(config, ("spec", "training", "model", "config"))
        yield from _check_vocabulary(view, config)


def _check_model_type(config: Mapping[str, Any]) -> Iterator[Problem]:
    path, kind = f"{_MODEL}.config.model_type", config.get("model_type")
    if "model_type" not in config:
        near = nearest("model_type", config)
        remedy = (
            f"Rename `{near}` to `model_type`"
            if near
            else "Add it, for example `model_type: llama`"
        )
        yield Problem(path, "missing", "it names the transformers architecture", remedy)
    elif not isinstance(kind, str) or not kind.strip():
        yield Problem(
            path,
            f"{show(kind)} is not the name of an architecture",
            "",
            "Write a text, such as llama",
        )


def _check_no_remote_code(value: Any, path: FieldPath) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            here = (*path, key)
            if key in _REMOTE_CODE:
                why = "code that comes with a model is never run"
                yield Problem(
                    format_path(here),
                    "not allowed",
                    why,
                    "Remove it; only transformers' own architectures are built",
                )
            else:
                yield from _check_no_remote_code(item, here)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _check_no_remote_code(item, (*path, index))


def _check_vocabulary(view: View, config: Mapping[str, Any]) -> Iterator[Problem]:
    size = config.get("vocab_size")
    reads_text = any(
        item["type"] == "jsonl" for _, item in view.items(f"{TRAINING}.data.sources")
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


def check_tokenizer(view: View) -> Iterator[Problem]:
    """A transformers tokenizer has a directory; the byte tokenizer has none."""
    path, kind = f"{TRAINING}.tokenizer.path", view.get(f"{TRAINING}.tokenizer.type")
    if kind == "transformers" and not view.is_given(path):
        yield Problem(
            path,
            "missing",
            "a tokenizer of type transformers is read from a local directory",
            "Add its path",
        )
    if kind == "byte" and view.is_given(path):
        why = "the byte tokenizer has no files"
        yield Problem(
            path, "has no meaning with type byte", why, "Remove it, or set type: transformers"
        )


def check_runtime(view: View) -> Iterator[Problem]:
    """Exact sums exist for plain data parallelism only."""
    found = view.known(f"{TRAINING}.reproducibility.elastic", f"{TRAINING}.runtime.parallelism")
    if found is not None and found[0] == "exact" and found[1] != "dataParallel":
        yield Problem(
            f"{TRAINING}.reproducibility.elastic",
            f"exact cannot be combined with runtime.parallelism {found[1]}",
            "sums that do not depend on order need the whole gradient in one place",
            "Set runtime.parallelism: dataParallel, or elastic: fast",
        )


def check_metrics(view: View) -> Iterator[Problem]:
    """An endpoint that does not exist cannot stay."""
    yield from check_endpoint(view, f"{TRAINING}.metrics")


def check_endpoint(view: View, section: str) -> Iterator[Problem]:
    """The same of the metrics section at ``section``."""
    path = f"{section}.lingerSeconds"
    found = view.known(path, f"{section}.port")
    if found is not None and found[0] > 0 and found[1] is None:
        yield Problem(
            path,
            "has no meaning without metrics.port",
            "there is no endpoint",
            "Add metrics.port, or remove it",
        )


RULES: Final = (
    check_options,
    check_overrides,
    check_files,
    check_horizon,
    check_batching,
    check_schedule_fits,
    check_model,
    check_tokenizer,
    check_runtime,
    check_metrics,
)

"""The identity of a run: the part of the manifest that must not change after the run has begun. Also converts
the whole manifest to JSON and back."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final

from evergrad_manifest.envelope import KINDS, TrainingRun
from evergrad_manifest.envelope.script import Script
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.differences import Change, changed_fields
from evergrad_manifest.model.fields import defaults_of, find_field
from evergrad_manifest.model.view import without_nulls
from evergrad_manifest.reading.validation import parse_run
from evergrad_manifest.training import Training
from evergrad_manifest.training.common import RECOMPUTATION_BY_SWITCH, without_meaningless
from evergrad_manifest.training.optimization import OF_OPTIMIZER, OF_SCHEDULE
from evergrad_manifest.training.pretrain import OF_SOURCES
from evergrad_manifest.training.two_stage_kl import without_default_beta
from evergrad_manifest.values.numbers import with_whole_numbers

RECIPE_SECTIONS: Final = (
    "recipe",
    "model",
    "tokenizer",
    "data",
    "rows",
    "batching",
    "optimizer",
    "schedule",
    "ema",
    "horizon",
    "reproducibility",
    "options",
    "twoStageKl",
    "preference",
    "latentEdit",
)
"""Sections of ``spec.training`` that decide the result. ``runtime`` decides it only by RECIPE_OF_RUNTIME, and
the fields in OPERATIONAL_DATA do not."""
RECIPE_OF_RUNTIME: Final = ("precision", "matmulPrecision", "attention")
"""Fields of ``spec.training.runtime`` that choose the arithmetic."""
OPERATIONAL_DATA: Final = ("preparedDirectory",)
DECIDED_BY_CONTENT: Final = re.compile(
    r"spec\.training\.((data\.sources\[\d+\]|tokenizer|model)\.path|latentEdit\.corpus)"
)
"""Fields that may differ in a run that has begun: the content at the path is compared when it is read."""
RECIPE_OF_SCRIPT: Final = ("command", "env", "workingDirectory")
"""Fields of ``spec.script`` that decide the result, as far as Evergrad can detect."""
FREE_MAPPINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("config", "configOverrides"),
    "options": (),
}
"""Sections of a typed recipe → their fields with values of any type; empty if the whole section is such a
field.

The type of a typed field gives each number one form, which is hashed as it is.
"""
OPERATIONAL_OF_SCRIPT: Final = (
    "valueFrom",
    "gracePeriodSeconds",
    "finishGracePeriodSeconds",
    "metrics",
)
"""Fields of ``spec.script`` that may change from one start to the next."""

_HASHED_AT_DEFAULT: Final = frozenset(
    {
        "training.recipe",
        "training.tokenizer.type",
        "training.data.sources[].type",
        "training.data.sources[].weight",
        "training.data.sources[].textField",
        "training.data.sources[].dtype",
        "training.data.malformed",
        "training.optimizer.type",
        "training.optimizer.betas",
        "training.optimizer.epsilon",
        "training.optimizer.weightDecay",
        "training.optimizer.clipNorm",
        "training.schedule.type",
        "training.schedule.warmup",
        "training.schedule.decay",
        "training.schedule.minimumRatio",
        "training.reproducibility.seed",
        "training.reproducibility.elastic",
        "training.runtime.precision",
        "script.env",
        "script.workingDirectory",
    }
)
"""Optional fields of the first version, which are part of the hash even at their default. Never add a field:
a later field is left out of the hash if it has its first default, so that a file without the field keeps its
hash."""
FIRST_DEFAULTS: Final[dict[str, Any]] = {}
"""Path (as above) of a later field whose default has changed → its first default. A file from before the
change means the first default, and so does a stored run without the field (``from_wire``)."""

_OF_ONE_MACHINE: Final = ("logging", "metrics", "initFrom", "onNonFinite", "skipSteps")
"""Sections that may differ between the nodes of one group. The group agrees on the last two when it forms."""
SETTINGS_OF_LOGGING: Final = ("trackers", "profile")
"""Fields of ``spec.training.logging`` that must nevertheless be the same on all nodes, if they are set."""
_RUNTIME_OF_ONE_MACHINE: Final = ("device", "threads", "collectiveTimeoutSeconds")
_LATER_SETTINGS: Final = frozenset(
    {
        "training.checkpoint.every.seconds",
        "training.checkpoint.every.tokens",
        "training.checkpoint.exportAtEnd",
        "training.checkpoint.keepEvery",
        "training.checkpoint.keepEvery.seconds",
        "training.checkpoint.keepEvery.steps",
        "training.checkpoint.keepEvery.tokens",
        "training.data.mixing",
        "training.data.overfitFirstBatch",
        "training.data.packing",
        "training.data.sources[].document",
        "training.data.sources[].samples",
        "training.ema",
        "training.ema.evaluate",
        "training.ema.warmup",
        "training.evaluation.generation",
        "training.evaluation.saveFirst",
        "training.evaluation.sets",
        "training.evaluation.sets[].every",
        "training.evaluation.sets[].samples",
        "training.evaluation.sets[].whileTraining",
        "training.evaluation.sources[].document",
        "training.evaluation.sources[].samples",
        "training.horizon.exhausted",
        "training.latentEdit",
        "training.latentEdit.alpha",
        "training.latentEdit.beta",
        "training.latentEdit.draws",
        "training.latentEdit.encoder",
        "training.latentEdit.encoder.dtype",
        "training.latentEdit.encoder.layer",
        "training.latentEdit.encoder.normalize",
        "training.latentEdit.encoder.padTo",
        "training.latentEdit.encoder.pooling",
        "training.latentEdit.encoder.prefix",
        "training.latentEdit.encoder.radius",
        "training.latentEdit.encoder.suffix",
        "training.latentEdit.encoder.weightHash",
        "training.latentEdit.features",
        "training.latentEdit.holdOut",
        "training.latentEdit.holdOut.chromosomes",
        "training.latentEdit.holdOut.edits",
        "training.latentEdit.holdOut.intervals",
        "training.latentEdit.holdOut.records",
        "training.latentEdit.margin",
        "training.latentEdit.mixture",
        "training.latentEdit.mixture[].count",
        "training.latentEdit.mixture[].edits",
        "training.latentEdit.mixture[].fallback",
        "training.latentEdit.phase",
        "training.latentEdit.predictor",
        "training.latentEdit.predictor.actionWidth",
        "training.latentEdit.predictor.alleleWidth",
        "training.latentEdit.predictor.heads",
        "training.latentEdit.predictor.layers",
        "training.latentEdit.predictor.stateWidth",
        "training.latentEdit.predictor.width",
        "training.latentEdit.windows",
        "training.model.configOverrides",
        "training.model.embeddingNoise",
        "training.model.headPrecision",
        "training.model.lora",
        "training.model.lora.alpha",
        "training.model.lora.baseDtype",
        "training.model.lora.dropout",
        "training.model.lora.rankStabilized",
        "training.model.lora.targetModules",
        "training.model.preset",
        "training.model.resizeEmbeddings",
        "training.monitors",
        "training.optimizer.groups",
        "training.optimizer.groups[].learningRateRatio",
        "training.optimizer.groups[].weightDecay",
        "training.optimizer.momentum",
        "training.optimizer.nesterov",
        "training.reproducibility.dataSeed",
        "training.reproducibility.deterministic",
        "training.runtime.matmulPrecision",
        "training.runtime.attention",
        "training.runtime.shards",
        "training.schedule.decayShape",
        "training.schedule.pieces",
        "training.schedule.pieces[].shape",
        "training.schedule.power",
        "training.schedule.startRatio",
        "training.rows",
        "training.rows.date",
        "training.twoStageKl",
        "training.twoStageKl.estimator",
        "training.twoStageKl.stages[].beta",
        "training.twoStageKl.stages[].mixture",
        "training.twoStageKl.stages[].tokens",
        "training.stop.early",
        "training.preference",
        "training.preference.beta",
        "training.preference.chosenField",
        "training.preference.labelSmoothing",
        "training.preference.loss",
        "training.preference.reference",
        "training.preference.rejectedField",
    }
)
"""Optional fields that are newer than the hash of the settings, which leaves them out if they have their
first default. Add every new field of ``spec.training`` here: otherwise the first edit of each existing run
would replace all its pods."""
_SWITCH_OF_RECOMPUTATION: Final = {mode: on for on, mode in RECOMPUTATION_BY_SWITCH.items()}

_OF_PREPARATION: Final = (
    "recipe",
    "tokenizer",
    "data",
    "rows",
    "options",
    "files",
    "twoStageKl",
)


def to_wire(run: TrainingRun) -> dict[str, Any]:
    """Return the whole resolved run as JSON values with camelCase keys. The result loads to the same run."""
    wire: dict[str, Any] = run.model_dump(mode="json", by_alias=True)
    wire["spec"] = {
        key: value
        for key, value in wire["spec"].items()
        if key not in KINDS or value is not None
    }
    if (training := wire["spec"].get("training")) is None:
        return wire

    # Remove keys that a file must not have together with the values of other keys, because the result has to
    # load again.
    training["optimizer"] = without_meaningless(training["optimizer"], OF_OPTIMIZER)
    training["schedule"] = without_meaningless(training["schedule"], OF_SCHEDULE)
    training["data"]["sources"] = [
        without_meaningless(source, OF_SOURCES) for source in training["data"]["sources"]
    ]
    training["evaluation"]["sources"] = [
        {
            key: value
            for key, value in without_meaningless(source, OF_SOURCES).items()
            if key not in ("weight", "samples")
        }
        for source in training["evaluation"]["sources"]
    ]

    # A task without a model or without text has left these sections out, and an empty section would be
    # refused.
    if not training["data"]["sources"]:
        del training["data"]
    if not any(training["model"].values()):
        del training["model"]
    return wire


def from_wire(raw: Mapping[str, Any]) -> TrainingRun:
    """Return the run that ``to_wire`` wrote, in this version or an earlier one. Raises ConfigurationError.

    ``to_wire`` writes every field. If a field is missing, it is newer than the file, so the file means the
    first default of the field, even if the default has changed since.
    """
    filled = deepcopy(dict(raw))
    for path, value in FIRST_DEFAULTS.items():
        *parents, key = ("spec", *path.split("."))

        # Descend one level at a time to the mappings that contain the field. Below a list (``name[]``) there
        # are several.
        holders: list[Any] = [filled]
        for index, part in enumerate(parents):
            name = part.removesuffix("[]")
            info = find_field(
                TrainingRun, tuple(one.removesuffix("[]") for one in parents[: index + 1])
            )
            # Create a missing section only if it exists by default. Otherwise a run without the section would
            # become a run with it.
            if info is not None and isinstance(
                info.get_default(call_default_factory=True), Section
            ):
                for holder in holders:
                    holder.setdefault(name, {})
            holders = [holder[name] for holder in holders if holder.get(name) is not None]
            if part.endswith("[]"):
                holders = [item for items in holders for item in items]
        for holder in holders:
            holder.setdefault(key, value)
    return parse_run(filled)


def recipe_of(run: TrainingRun) -> dict[str, Any]:
    """Return the part of ``training`` or ``script`` that decides the result and must not change while the run
    exists, with camelCase keys.

    It has no nulls, and every default is written out.
    """
    # Remove nulls, which represent omitted fields: otherwise each new field of the models would add one.
    if run.spec.script is not None:
        script = without_nulls(to_wire(run)["spec"]["script"], Script)
        return {field: script[field] for field in RECIPE_OF_SCRIPT}
    training = without_nulls(_meant(run), Training)
    recipe = {
        section: training[section] for section in RECIPE_SECTIONS if section in training
    }
    if "data" in recipe:
        recipe["data"] = {
            key: value
            for key, value in recipe["data"].items()
            if key not in OPERATIONAL_DATA
        }
    # The use of the machine may change from one start to the next. Only the arithmetic decides the result.
    recipe["runtime"] = {field: training["runtime"][field] for field in RECIPE_OF_RUNTIME}
    return recipe


def config_hash(run: TrainingRun) -> str:
    """Return the SHA-256 of the recipe, 64 hex digits: the identity of a run, which its checkpoints contain.

    The horizon is left out, so that an extended run stays the same run. Fields that are newer than the first
    version are left out if they have their first default, so that a new version computes the same hash as an
    old one.
    """
    return hash_recipe(hashed_recipe(run))


def hash_recipe(recipe: Mapping[str, Any]) -> str:
    """Return the hash of ``recipe``: the result of ``hashed_recipe``, or the recipe in a checkpoint.

    Older versions kept numbers as the file had them (10000.0), so their checkpoints contain another hash.
    This function returns the hash that the run has today.
    """
    one_form = dict(recipe)
    for section, keys in FREE_MAPPINGS.items():
        if section not in one_form:
            continue
        part = one_form[section]
        one_form[section] = (
            {
                key: with_whole_numbers(value) if key in keys else value
                for key, value in part.items()
            }
            if keys
            else with_whole_numbers(part)
        )

    # Sort the keys, and write no spaces and UTF-8: checkpoints contain this hash, so not one byte may change.
    text = json.dumps(
        one_form,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def hashed_recipe(run: TrainingRun) -> dict[str, Any]:
    """Return the recipe from which a run's identity is computed, as its checkpoints contain it.

    It lacks the horizon, which may grow, and later fields at their first default, so that a refused resume
    names only fields that one of the files sets.
    """
    recipe = {
        section: value for section, value in recipe_of(run).items() if section != "horizon"
    }
    if run.spec.script is not None:
        return _without_later_defaults(recipe, run.spec.script, "script.", _is_later)
    return _without_later_defaults(recipe, run.training, "training.", _is_later)


def _is_later(path: str) -> bool:
    """Return whether an optional field of the recipe is newer than the first version."""
    return path not in _HASHED_AT_DEFAULT


def _is_later_setting(path: str) -> bool:
    """Return whether an optional setting is newer than the hash of the settings."""
    return path in _LATER_SETTINGS


def settings_hash(run: TrainingRun) -> str:
    """Return a hash of all settings that must be the same on the nodes of a typed run that train together, 16
    hex digits.

    It covers more than the recipe: nodes that save, evaluate or stop at different steps would wait for each
    other. It covers less than the file, because settings of one machine may differ. A file that sets no later
    field keeps the hash of the previous version, which the operator has stored.
    """
    # Each of these sections decides what all ranks do at the same step, or is sent between them.
    training = _meant(run)
    shared = {key: value for key, value in training.items() if key not in _OF_ONE_MACHINE}
    shared["runtime"] = {
        key: value
        for key, value in training["runtime"].items()
        if key not in _RUNTIME_OF_ONE_MACHINE
    }
    # Trackers and traces are set up at a start, so a change of them restarts the nodes.
    observing = {
        key: value for key in SETTINGS_OF_LOGGING if (value := training["logging"][key])
    }
    if observing:
        shared["logging"] = observing
    if "data" in shared:
        shared["data"] = {
            key: value
            for key, value in shared["data"].items()
            if key not in OPERATIONAL_DATA
        }

    # Leave out ``whileTraining`` if it equals its default, so that writing it out does not change the hash.
    # By default, sets are evaluated while training, and with evaluation pods they are not.
    is_inline = run.spec.evaluation is None
    for item in shared["evaluation"]["sets"]:
        if item["whileTraining"] in (None, is_inline):
            del item["whileTraining"]

    # Write the values of the first version, in which this field was true or false.
    shared = _without_later_defaults(shared, run.training, "training.", _is_later_setting)
    if not is_inline:
        shared["evaluatedByPods"] = True
    mode = shared["runtime"]["activationCheckpointing"]
    shared["runtime"]["activationCheckpointing"] = _SWITCH_OF_RECOMPUTATION.get(mode, mode)
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def preparation_hash(run: TrainingRun) -> str:
    """Return a hash of all fields of a typed run that decide its prepared data, 16 hex digits.

    Another version may compute another hash: a preparation that finds its data then only checks them.
    """
    training = _meant(run)
    parts = {key: training.get(key) for key in _OF_PREPARATION}
    parts["evaluation"] = training["evaluation"]["sources"]
    parts["seed"] = run.training.reproducibility.seed_of_data
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def changed_settings(before: TrainingRun, run: TrainingRun) -> list[Change]:
    """Return every field of ``spec.training`` outside of the recipe that differs, and the horizon, for a run
    that is being edited while it exists.

    This includes the paths of data, tokenizer and model, because the recipe means their content. The text of
    a file in the manifest is replaced by a hash, because each change is one line of the run's events. The
    part of ``spec.evaluation`` that nodes receive is compared, too: its existence, and ``keepWaiting``.
    """
    # Compare the meaning and not the text: a default that is now written out is not a change.
    pair = [without_nulls(_meant(one), Training) for one in (before, run)]
    for training in pair:
        training["files"] = {
            name: f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            for name, text in training["files"].items()
        }
    given = [
        {"evaluation": {"keepWaiting": pods.keep_waiting}} if pods is not None else {}
        for pods in (before.spec.evaluation, run.spec.evaluation)
    ]
    return [*changed_fields(*pair), *changed_fields(*given, where="spec")]


def _meant(run: TrainingRun) -> dict[str, Any]:
    """Return ``spec.training`` as JSON values, without values that a file without them would mean as well,
    even though they are not the default of a field."""
    training: dict[str, Any] = to_wire(run)["spec"]["training"]
    if training["twoStageKl"] is not None:
        training["twoStageKl"] = without_default_beta(training["twoStageKl"])
    return training


@functools.cache
def _fields_of(
    kind: type[Section], prefix: str, came_later: Callable[[str], bool]
) -> tuple[tuple[str, str, str, bool], ...]:
    """Return for each field of a section: its name, its key, its path, and whether it is newer than the first
    version.

    A required field is written in every file. Of the optional fields, only the fields of the first version
    were hashed at their default.
    """
    return tuple(
        (
            name,
            key := info.alias or name,
            f"{prefix}{key}",
            not info.is_required() and came_later(f"{prefix}{key}"),
        )
        for name, info in kind.model_fields.items()
    )


def _without_later_defaults(
    wire: Mapping[str, Any],
    section: Section,
    prefix: str,
    came_later: Callable[[str], bool],
) -> dict[str, Any]:
    """Return ``wire``, the JSON values of ``section``, without later fields at their first default and
    without sections that are empty then.

    ``came_later``: returns whether an optional field, by its path, is newer than the first version of the
    hash.
    """
    kept: dict[str, Any] = {}
    for name, key, path, is_later in _fields_of(type(section), prefix, came_later):
        if key not in wire:
            continue
        value, written = getattr(section, name), wire[key]
        if isinstance(value, Section):
            written = _without_later_defaults(written, value, f"{path}.", came_later)
            if is_later and not written:
                continue
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            pairs = zip(written, value, strict=True)
            written = [
                _without_later_defaults(item, one, f"{path}[].", came_later)
                for item, one in pairs
            ]
        elif is_later and value == FIRST_DEFAULTS.get(
            path, defaults_of(type(section)).get(key)
        ):
            continue
        kept[key] = written
    return kept

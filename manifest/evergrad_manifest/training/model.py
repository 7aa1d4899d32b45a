"""The model: its configuration or directory, changes to it, and adapters for frozen weights."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import FreeMapping, LocalPath, Section, Switch
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import TRAINING
from evergrad_manifest.training.presets import PRESETS, check_preset
from evergrad_manifest.training.two_stage_kl import RECIPE as KL_RECIPE
from evergrad_manifest.values.numbers import Count, Fraction, Real, show

MODEL: Final = f"{TRAINING}.model"
_REMOTE_CODE: Final = ("auto_map", "trust_remote_code", "custom_pipelines")
_FIXED: Final = {
    "model_type": "the stored weights are those of their own architecture",
    "vocab_size": "it follows from the stored tables, which resizeEmbeddings enlarges",
}
"""Keys of a stored configuration that cannot be changed, each with the reason."""
_OTHERS: Final = ("config", "path")
_OF_STORED: Final = ("configOverrides", "resizeEmbeddings")
"""Fields that change the content of a model directory."""

ModuleName = Annotated[str, Field(min_length=1, max_length=253)]


class Lora(Section):
    """Low-rank adapters (peft) on frozen weights; only they are trained and saved."""

    rank: Count = Field(ge=1, le=4096)
    """Inner size of the two matrices whose product is added to the weights of a layer."""
    alpha: Real | None = Field(default=None, gt=0, le=1e6)
    """The product is multiplied by alpha / rank. Default: twice the rank."""
    dropout: Fraction = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped while training."""
    target_modules: tuple[ModuleName, ...] = Field(default=(), max_length=256)
    """Linear layers that get an adapter, by the end of their names, for example ``q_proj``. Default: all
    except the output head."""
    rank_stabilized: Switch = False
    """Multiply by alpha / sqrt(rank) instead of alpha / rank."""
    base_dtype: Literal["fp32", "bf16"] | None = None
    """Type of the frozen weights. Default: the type of ``runtime.precision``, which the adapters have."""

    @property
    def scale(self) -> float:
        """The numerator of the adapters' factor."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class ResizeEmbeddings(Section):
    """Enlarges a stored model's tables to the tokenizer's vocabulary; a new row is the mean of the old."""

    multiple_of: Count = Field(ge=1, le=2**16)
    """The number of rows becomes a multiple of this: 1, or 8 to 128 for sizes that accelerators compute
    faster."""


class Model(Section):
    """A transformers causal model. Exactly one of ``config``, ``path`` and ``preset``."""

    config: FreeMapping | None = None
    """A transformers configuration with its ``model_type``. The weights are initialized from the seed."""
    path: LocalPath | None = None
    """A local transformers directory with a configuration and, if present, safetensors weights."""
    preset: Annotated[str, AfterValidator(check_preset), Field(max_length=32)] | None = None
    """Name of a configuration, for example ``llama-50M``."""

    config_overrides: FreeMapping = Field(default_factory=dict)
    """Keys that replace keys of the directory's configuration, for example ``attention_dropout``."""
    resize_embeddings: ResizeEmbeddings | None = None
    """Enlarge the embeddings of a directory if they are smaller than the tokenizer's vocabulary."""
    embedding_noise: Real | None = Field(default=None, gt=0, le=1e4)
    """Alpha of NEFTune. While training, embeddings get uniform noise of at most alpha / sqrt(tokens of a
    sample x their width)."""
    head_precision: Literal["fp32"] | None = None
    """Compute the output head in fp32. Default: the precision of ``runtime.precision``."""
    lora: Lora | None = None
    """Train LoRA adapters instead of the weights."""

    @model_validator(mode="before")
    @classmethod
    def _write_out_preset(cls, raw: Any) -> Any:
        """Replace a preset by its configuration. The configuration identifies the run, so the run continues
        even if a later version has other presets."""
        if not isinstance(raw, Mapping) or any(raw.get(key) is not None for key in _OTHERS):
            return raw
        name = raw.get("preset")
        if not isinstance(name, str) or name not in PRESETS:
            return raw
        return {**raw, "preset": None, "config": dict(PRESETS[name])}

    @property
    def is_given(self) -> bool:
        """Whether the file describes a model. A custom task may create all its modules itself."""
        return self.config is not None or self.path is not None


def check_model(view: View) -> Iterator[Problem]:
    """Check that exactly one of configuration, path and preset is set, and that a configuration names its
    type and runs no foreign code."""
    if view.get(MODEL) is UNKNOWN or not view.is_given(MODEL):
        return
    # Count keys in the file and not in the values, because a wrong value counts as set.
    names = (*_OTHERS, "preset")
    given = [name for name in names if view.is_given(f"{MODEL}.{name}")]
    if not given:
        yield Problem(
            MODEL,
            "names no model",
            "one of config, path and preset is needed",
            "Add one of them",
        )
    if len(given) > 1:
        yield Problem(
            MODEL,
            f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} set",
            "a model is exactly one of them",
            "Remove one of them" if len(given) == 2 else "Keep one of them",
        )
    config = view.get(f"{MODEL}.config")
    if not isinstance(config, Mapping):
        return

    # transformers would report a missing type only after its import, on the machine that trains.
    path, kind = f"{MODEL}.config.model_type", config.get("model_type")
    if "model_type" not in config:
        near = nearest("model_type", config)
        remedy = (
            f"Rename `{near}` to `model_type`"
            if near
            else "Add it, for example `model_type: llama`"
        )
        yield Problem(path, "missing", "it names the transformers architecture", remedy)
    elif not isinstance(kind, str) or not kind.strip():
        what = f"{show(kind)} is not the name of an architecture"
        yield Problem(path, what, "", "Write a text, such as llama")
    yield from _check_no_remote_code(config, ("spec", "training", "model", "config"))


def _check_no_remote_code(value: Any, path: FieldPath) -> Iterator[Problem]:
    # Check every level: a part of a model, such as its vision tower, has its own configuration.
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


def check_stored(view: View) -> Iterator[Problem]:
    """Check that changes of a stored model have a model directory, and do not change settings on which its
    weights depend."""
    if view.get(MODEL) is UNKNOWN or not view.is_given(MODEL):
        return
    for key in _OF_STORED:
        # The resolved file of a run contains the empty default.
        if view.raw(*MODEL.split("."), key) and not view.is_given(f"{MODEL}.path"):
            why = "it changes what a directory holds, and there is none"
            remedy = "Write the values into model.config"
            if key == "resizeEmbeddings":
                remedy = "Remove it; a configuration without vocab_size has the tokenizer's"
            yield Problem(
                f"{MODEL}.{key}", "has no meaning without model.path", why, remedy
            )

    overrides = view.get(f"{MODEL}.configOverrides")
    if not isinstance(overrides, Mapping):
        return
    for key, why in _FIXED.items():
        if key in overrides:
            remedy = "Remove it" if key == "model_type" else "Use model.resizeEmbeddings"
            yield Problem(
                f"{MODEL}.configOverrides.{key}", "cannot be changed", why, remedy
            )
    yield from _check_no_remote_code(
        overrides, ("spec", "training", "model", "configOverrides")
    )


def check_lora(view: View) -> Iterator[Problem]:
    """Check that adapters are used only with recipes that do not copy the trained model, that pairs use the
    base model as the reference, and that each layer is named once."""
    path = f"{MODEL}.lora"
    if view.get(MODEL) is UNKNOWN or not view.is_given(path):
        return
    if view.get(f"{TRAINING}.recipe") == KL_RECIPE:
        why = "the reference is taken from a checkpoint, and one of adapters has no whole model"
        remedy = "Remove it, or train adapters with pretrain or sft"
        yield Problem(path, f"cannot be combined with recipe {KL_RECIPE}", why, remedy)
    if view.is_given(f"{TRAINING}.preference.reference"):
        why = "a reference is built as the model is, and adapters have one base"
        remedy = "Remove it, and name the directory of whole weights as model.path, or adapters as initFrom"
        yield Problem(
            f"{TRAINING}.preference.reference",
            "cannot be combined with model.lora",
            why,
            remedy,
        )
    names = view.get(f"{path}.targetModules")
    for index, name in enumerate(names if isinstance(names, list | tuple) else ()):
        if name in names[:index]:
            where = f"{path}.targetModules[{index}]"
            yield Problem(where, f"{name!r} is named twice", "", "Remove one of them")


RULES: Final = (check_model, check_stored, check_lora)

"""Builds a transformers causal model from a configuration or a local directory.

Only safetensors files are loaded, and remote code is never run.
"""

import copy
import difflib
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import Model
from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.adapters import add_adapters
from evergrad_trainer.models.architecture import (
    NOT_CAUSAL,
    Attention,
    causal_class,
    choose_attention,
    find_untied,
    untie,
)
from evergrad_trainer.models.configuration import (
    check_older_keys,
    check_shapes,
    find_older_keys,
    translate_numbers,
)
from evergrad_trainer.models.embeddings import add_noise, padded_size, resize_embeddings
from evergrad_trainer.models.heads import make_full_precision
from evergrad_trainer.models.imports import import_transformers
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.models.stored_files import find_ambiguity
from evergrad_trainer.run.record import CORRECTED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_FIELD = "spec.training.model"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "fp32": torch.float32,
    "bf16-autocast": torch.float32,
    "fp16-autocast": torch.float32,
    "bf16": torch.bfloat16,
}
"""Type of the weights for each value of ``runtime.precision``."""
PRODUCTS = {
    "fp32": torch.float32,
    "bf16-autocast": torch.bfloat16,
    "fp16-autocast": torch.float16,
    "bf16": torch.bfloat16,
}
"""Type of matrix products for each value of ``runtime.precision``."""
_NO_PART_OF_THE_MODEL = (
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "id2label",
    "label2id",
)
"""Configuration keys that do not change the computation, or that this program sets itself."""
_PLAIN = Model.model_validate({})
"""The default settings, which leave the model unchanged."""
_LARGE_VOCABULARY: Final = 2**20
"""A vocabulary size larger than the vocabulary of any tokenizer."""


@dataclass(frozen=True)
class ModelPlan:
    """Plan of a model: a configuration, and the directory of its weights if it has any.

    If ``config`` is None, the manifest describes no model and the task builds all its modules itself.
    ``settings``: the changes to apply after the model is built. ``stored_config``: the configuration to load
    the weights with, if it differs from the configuration in their directory. ``untied``: the names of two
    tensors whose values differ although the stored configuration ties them; ``config`` does not tie them.
    """

    config: "PreTrainedConfig | None"
    weights: Path | None
    settings: Model = _PLAIN
    stored_config: "PreTrainedConfig | None" = None
    untied: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return "" if self.config is None else str(self.config.model_type)

    def weight_type(self, precision: str) -> torch.dtype:
        """The type that weights are built in. Adapters always use the type of ``precision``."""
        lora = self.settings.lora
        return DTYPES[precision if lora is None or not lora.base_dtype else lora.base_dtype]

    @property
    def attention(self) -> Attention:
        """The implementation of attention that the model is built with."""
        return choose_attention(self.require_config())

    def require_config(self) -> "PreTrainedConfig":
        """Return the configuration. Raises ModelError if the manifest describes no model."""
        if self.config is None:
            why = "the task's build asks for the model that it describes"
            raise ModelError(
                Problem(_FIELD, "missing", why, "Add it, or make all modules in build")
            )
        return self.config

    def describe(self) -> dict[str, Any]:
        """Return the configuration as transformers resolved it, including its defaults, as JSON values.

        These values define the function that the model computes. The manifest and the path of a directory do
        not, because defaults change between versions of transformers and users can edit the files.
        """
        config = {} if self.config is None else self.config.to_dict()
        kept = {
            key: value
            for key, value in config.items()
            if key not in _NO_PART_OF_THE_MODEL and not key.startswith("_")
        }
        values: dict[str, Any] = json.loads(json.dumps(kept, default=str))
        described = {
            "transformers": str(config.get("transformers_version", "")),
            "config": values,
        }
        if self.untied is not None:
            # The record of a run started by an older version has the value from the directory here.
            described[CORRECTED] = {"tie_word_embeddings": True}
        return described


def plan_model(
    settings: Model, *, base_directory: Path, vocab_size: int | None
) -> ModelPlan:
    """Read the configuration and check it against the tokenizer, without building the model.

    ``vocab_size``: the vocabulary size of the tokenizer; None if the tokenizer is not on this machine. In
    that case the sizes are not compared, and a configuration without ``vocab_size`` gets a size that is
    large enough for every id. Raises ModelError if the model cannot be used.
    """
    if not settings.is_given:
        return ModelPlan(None, None)
    if settings.path is not None:
        plan = plan_directory(base_directory / settings.path, settings)
    else:
        default = _LARGE_VOCABULARY if vocab_size is None else vocab_size
        plan = ModelPlan(_read_config(settings.config or {}, default), None, settings)
    where = f"{_FIELD}.{'config' if settings.path is None else 'path'}"
    raise_if(check_shapes(plan.require_config(), where=where), ModelError)
    text = plan.require_config().get_text_config()
    own = int(text.vocab_size)
    if settings.resize_embeddings is not None:
        # Never shrink the embeddings, so that the model's existing ids stay valid.
        multiple_of = settings.resize_embeddings.multiple_of
        rows = padded_size(max(own, vocab_size or 0), multiple_of=multiple_of)
        plan = replace(plan, stored_config=copy.deepcopy(plan.require_config()))
        own = text.vocab_size = rows
    if vocab_size is not None and own < vocab_size:
        where = f"{_FIELD}.config.vocab_size" if settings.path is None else f"{_FIELD}.path"
        raise ModelError(
            Problem(
                where,
                f"{own} is below the tokenizer's {vocab_size} ids",
                "tokens would have no embedding",
                f"Set vocab_size to at least {vocab_size}, or leave it out"
                if settings.path is None
                else "Use the model's own tokenizer, or model.resizeEmbeddings: {multipleOf: 8}",
            )
        )
    return plan


def plan_directory(
    directory: Path, settings: Model = _PLAIN, *, field: str = f"{_FIELD}.path"
) -> ModelPlan:
    """Plan the model in a transformers directory, with the changes of ``settings``.

    ``field``: the manifest field that names the directory. Raises ModelError if the directory or its
    configuration cannot be used.
    """
    config = _read_directory(directory, settings.config_overrides, field)
    changed = config if settings.config_overrides else None
    weights = find_weights(directory, field=field)
    # Decide here whether weights are tied, for every caller that builds the model. transformers decides only
    # when it loads the weights, which does not happen when a checkpoint is loaded or parameters are counted.
    untied = None if weights is None else _find_untied(config, settings, weights)
    if untied is not None:
        changed = config
        untie(config)
    plan = ModelPlan(config, weights, settings, changed, untied)
    _check_is_causal(type(config), field)
    return plan


def _check_is_causal(kind: "type[PreTrainedConfig]", field: str) -> None:
    """Raise ModelError unless transformers has a causal language model for configurations of this class."""
    if causal_class(kind) is None:
        raise ModelError(
            Problem(
                field,
                f"{kind.model_type} cannot be trained",
                "transformers has no causal language model of this type",
                "Use one of the architectures in docs/reference/architectures.md",
            )
        )


def _find_untied(
    config: "PreTrainedConfig", settings: Model, weights: Path
) -> tuple[str, str] | None:
    """Call ``find_untied``. Raises ModelError if the manifest explicitly ties tensors that differ."""
    untied = find_untied(config, weights)
    if untied is not None and settings.config_overrides.get("tie_word_embeddings"):
        raise ModelError(
            Problem(
                f"{_FIELD}.configOverrides.tie_word_embeddings",
                "cannot be true",
                f"{untied[0]} and {untied[1]} of {weights} differ, and one of them would be lost",
                "Remove it to train both",
            )
        )
    return untied


def build_model(
    plan: ModelPlan, *, seed: int, precision: str, with_weights: bool = True
) -> "PreTrainedModel":
    """Build the model on the CPU, in training mode. Its initial weights depend only on ``seed``.

    ``with_weights=False`` leaves the weights uninitialised, because a checkpoint will overwrite them. With
    LoRA, the frozen weights are loaded in any case, because a checkpoint contains only the adapters.
    Raises ModelError if the model cannot be built.
    """
    config = plan.require_config()
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    # Stored weights take precedence over the seed, and a checkpoint takes precedence over both, because it
    # contains every trained weight.
    dtype = plan.weight_type(precision)
    with_weights = with_weights or plan.settings.lora is not None
    if with_weights and plan.weights is not None:
        model = load_directory(
            plan.weights, dtype, config=plan.stored_config, attention=plan.attention
        )
        rows = int(config.get_text_config().vocab_size)
        if plan.settings.resize_embeddings is not None:
            resize_embeddings(model, rows)
    else:
        seed_generators(seed, 0, 0, Purpose.INITIAL_WEIGHTS)
        # If a checkpoint follows, skip the initialisation: the checkpoint overwrites every weight.
        with nullcontext() if with_weights else no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=plan.attention
            )
            # no_init_weights also skips tying, but tied weights must be one tensor, as in the checkpoint.
            model.tie_weights()
    _check_causal(model, plan.name)
    model.config.use_cache = False
    change_model(model, plan, seed=seed, precision=precision)
    model.train()
    return model


def _check_causal(model: "PreTrainedModel", name: str) -> None:
    """Raise ModelError if tokens attend to later tokens: the model would learn to copy the next token."""
    # Check the class: any configuration stores an unknown key, but its model does not read it.
    config: Any = model.config
    is_encoder = hasattr(type(config), "is_decoder") and not config.is_decoder
    if not is_encoder and name not in NOT_CAUSAL:
        return
    remedy = "Use a causal architecture: docs/reference/architectures.md lists them"
    if is_encoder:
        remedy = "Set is_decoder: true in its configuration, or use another architecture"
    raise ModelError(
        Problem(
            _FIELD, f"a {name} model is not causal", "its tokens see the next ones", remedy
        )
    )


def change_model(
    model: "PreTrainedModel", plan: ModelPlan, *, seed: int, precision: str
) -> None:
    """Apply the plan's settings to a built or empty model, in place.

    Raises ModelError if a setting does not fit the model.
    """
    settings = plan.settings
    if settings.embedding_noise is not None:
        add_noise(model, settings.embedding_noise)
    if settings.head_precision is not None:
        make_full_precision(model)
    # Add adapters last, because an adapter on the head wraps the head.
    if settings.lora is not None:
        add_adapters(model, settings.lora, seed=seed, dtype=DTYPES[precision])


def build_empty_model(plan: ModelPlan, *, precision: str) -> "PreTrainedModel":
    """Build the model on the meta device: names, types and shapes, without memory for tensors.

    Raises ModelError if the model cannot be built.
    """
    # Call this outside the try block: its ModelError already contains a remedy.
    config = plan.require_config()
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    def build(device: AbstractContextManager[Any]) -> "PreTrainedModel":
        with device, no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=plan.weight_type(precision),
                attn_implementation=plan.attention,
            )
            model.tie_weights()
            # Move buffers too: models compute them from numbers, so they were allocated on the CPU.
            torch.nn.Module.to(model, "meta")
            return model

    try:
        try:
            model = build(_WeightsOnMeta())
        except RuntimeError:
            # Some models, for example gemma4, combine weights with computed tensors while they are built.
            model = build(torch.device("meta"))
    except Exception as error:
        # Shapes that do not fit are detected only when the layers are created.
        raise ModelError(
            Problem(
                f"{_FIELD}.config",
                _one_line(error),
                f"a {plan.name} model cannot be built from it",
            )
        ) from error
    _check_causal(model, plan.name)
    change_model(model, plan, seed=0, precision=precision)
    return model


class _WeightsOnMeta(TorchFunctionMode):
    """Creates weights on the meta device, and other tensors on the CPU.

    ``torch.device("meta")`` would also put the tables of rotary angles on the meta device, which imports
    sympy and takes half a second.
    """

    _OF_WEIGHTS = frozenset(
        {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
    )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in self._OF_WEIGHTS and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def _read_config(values: dict[str, Any], vocab_size: int) -> "PreTrainedConfig":
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    values = dict(values)
    model_type = str(values.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            _unknown(
                f"{_FIELD}.config.model_type",
                model_type,
                list(CONFIG_MAPPING),
                "transformers has no such model",
            )
        )
    kind = CONFIG_MAPPING[model_type]
    _check_is_causal(kind, f"{_FIELD}.config.model_type")
    # Reject unknown keys: transformers would store them, and they would have no effect.
    defaults = kind().to_dict()
    known = set(defaults)
    if "vocab_size" not in known:
        # For example, a model of text and images: training on text alone leaves parts of it untrained.
        inner = str((defaults.get("text_config") or {}).get("model_type", ""))
        raise ModelError(
            Problem(
                f"{_FIELD}.config.model_type",
                f"{model_type} is not a model of text only",
                "its other parts would get no gradients",
                f"Set model_type: {inner}" if inner else "Use an architecture of text only",
            )
        )
    values.setdefault("vocab_size", vocab_size)
    # Accept older keys, because transformers itself translates them to current keys.
    older = find_older_keys(values, known)
    problems = [
        _unknown(
            f"{_FIELD}.config.{key}",
            key,
            sorted(known),
            f"a {model_type} configuration has no such key",
        )
        for key in values
        if key not in known and key not in older
    ]
    if problems:
        raise ModelError(*problems)
    try:
        # Copy the values, because transformers modifies the mappings that it receives.
        given = copy.deepcopy(translate_numbers(kind, values))
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **given)
    except Exception as error:
        # The checks of a model raise exceptions of any type, all of them about the user's values.
        raise ModelError(
            Problem(
                f"{_FIELD}.config",
                _one_line(error),
                f"transformers refuses this {model_type} configuration",
            )
        ) from error
    raise_if(check_older_keys(f"{_FIELD}.config", values, older, config), ModelError)
    return config


def _read_directory(
    directory: Path, overrides: dict[str, Any], field: str
) -> "PreTrainedConfig":
    """Return the configuration of a transformers directory, with ``overrides`` applied."""
    import_transformers()
    from transformers.models.auto.configuration_auto import AutoConfig

    if not (directory / "config.json").is_file():
        raise ModelError(
            Problem(
                field,
                f"{directory} contains no config.json",
                "names of a model hub are not taken, and nothing is downloaded",
                "Give a local transformers directory (save_pretrained writes one)",
            )
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(
            Problem(
                field,
                f"{directory}/config.json cannot be used: {_one_line(error)}",
                "remote code is never run",
                "Use a model that transformers itself has",
            )
        ) from error
    if not overrides:
        return config
    known = config.to_dict()
    # Reject unknown keys: transformers would store them, and they would have no effect.
    why = f"a {config.model_type} configuration has no such key"
    raise_if(
        [
            _unknown(f"{_FIELD}.configOverrides.{key}", key, sorted(known), why)
            for key in overrides
            if key not in known
        ],
        ModelError,
    )
    try:
        given = copy.deepcopy(translate_numbers(type(config), overrides))
        changed: PreTrainedConfig = type(config).from_dict({**known, **given})
    except Exception as error:
        # The checks of a model raise exceptions of any type.
        what = f"transformers refuses this {config.model_type} configuration"
        where = f"{_FIELD}.configOverrides"
        raise ModelError(Problem(where, _one_line(error), what)) from error
    return changed


def find_weights(directory: Path, *, field: str = f"{_FIELD}.path") -> Path | None:
    """Return the directory if it has safetensors files; None if it has no weights.

    ``field``: the manifest field that names the directory. Raises ModelError if the directory has only
    pickled weights, or two sets of weights.
    """
    if any(directory.glob("*.safetensors")):
        # Refuse two sets of weights, because every process that loads them must load the same set.
        if (problem := find_ambiguity(directory, field=field)) is not None:
            raise ModelError(problem)
        return directory
    pickled = sorted(
        path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES
    )
    if pickled:
        raise ModelError(
            Problem(
                field,
                f"{directory} has weights only as pickle ({pickled[0]})",
                "loading a pickle runs whatever code is in it",
                "Convert it where you trust it: model.save_pretrained(directory, safe_serialization=True)",
            )
        )
    return None


def load_directory(
    directory: Path,
    dtype: torch.dtype,
    *,
    config: "PreTrainedConfig | None" = None,
    attention: Attention = "sdpa",
) -> "PreTrainedModel":
    """Load the model and weights of a transformers directory.

    If ``config`` is given, it replaces the configuration in the directory. Raises ModelError if a weight is
    missing or has another shape.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # transformers would apply these adapters to the weights, but only if peft is installed.
    if (directory / "adapter_config.json").exists():
        what, why = (
            "has adapters in addition to its weights",
            "only some installations would load them",
        )
        remedy = "Merge them into the weights, or remove adapter_config.json"
        raise ModelError(Problem(str(directory), what, why, remedy))
    disable_progress_bar()
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with _watch_reading() as read:
            model, info = load(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                # Mismatches are refused below with their names; the error of transformers refers to a log.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(
            Problem(
                str(directory),
                f"the weights cannot be loaded: {_one_line(error)}",
                remedy="Check that the files are whole and belong to config.json",
            )
        ) from error
    # transformers would initialise missing weights with random values.
    missing = sorted(
        {*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    )
    if missing:
        raise ModelError(
            Problem(
                str(directory),
                f"{len(missing)} weights are missing or of another shape, first {missing[0]}",
                "the model would be partly random",
                "Use weights of the same architecture and size",
            )
        )
    loaded: PreTrainedModel = model
    _check_tied(loaded, directory)
    # Count the bytes that _watch_reading did not count.
    num_bytes = sum(one.numel() * one.element_size() for one in loaded.parameters())
    MOVED.note(max(0, num_bytes - sum(read)))
    return loaded


def _check_tied(model: "PreTrainedModel", directory: Path) -> None:
    """Raise ModelError if transformers left tensors separate that the configuration ties.

    A model that is built without these weights, to load a checkpoint, would have a single tensor.
    """
    expected = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = sorted(expected.keys() - model.all_tied_weights_keys.keys())
    if apart:
        raise ModelError(
            Problem(
                str(directory),
                f"{apart[0]} and {expected[apart[0]]} differ",
                "the configuration says that they are one tensor (tie_word_embeddings: true)",
                "Set tie_word_embeddings: false in the configuration of both, or remove one of the tensors",
            )
        )


@contextmanager
def _watch_reading() -> Iterator[list[int]]:
    """Count one byte as moved for each weight that transformers has read, and yield the list of counts.

    transformers iterates over the weights in a progress bar and provides a hook that creates the bar. The
    hook reports each item, but not its size. A version without the progress bar reports nothing here.
    """
    from transformers.utils import logging

    noted: list[int] = []

    def note_each(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            yield item
            noted.append(1)
            MOVED.note(1)

    def make_bar(factory: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return (
            factory(note_each(args[0]), *args[1:], **kwargs) if args else factory(**kwargs)
        )

    before = logging.set_tqdm_hook(make_bar)
    try:
        yield noted
    finally:
        logging.set_tqdm_hook(before)


def _unknown(path: str, name: str, known: list[str], why: str) -> Problem:
    near = difflib.get_close_matches(name, known, n=1)
    return Problem(
        path,
        f"unknown name {name!r}",
        why,
        f"Did you mean {near[0]!r}?"
        if near
        else "Check transformers' documentation of this model",
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return textwrap.shorten(text, 300, placeholder=" …") or type(error).__name__

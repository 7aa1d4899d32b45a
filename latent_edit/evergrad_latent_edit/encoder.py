"""The frozen encoder: a model that makes a state of a sequence, one sequence at a time.

One at a time, on one thread of a processor, since a product of matrices may give a row other bits beside
other rows: so a state is a function of its sequence alone, whether it is kept or made anew.
"""

import dataclasses
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from evergrad_latent_edit.corpus import hash_file
from evergrad_manifest.errors import Problem
from evergrad_manifest.training.latent_edit import EditEncoder
from evergrad_trainer.base.errors import DataError, ModelError
from evergrad_trainer.data.tokenizers import TextTokenizer, load_tokenizer
from evergrad_trainer.models.build import ModelPlan, build_model, plan_model
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.record import (
    FIRST_MODEL,
    ModelRecord,
    comparable_configs,
    read_optional,
)
from evergrad_trainer.task import Setup

_SECTION: Final = "spec.training.latentEdit.encoder"
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_RADIUS: Final = 8


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence as the encoder reads it. The state is the mean over the tokens [first, last)."""

    ids: npt.NDArray[np.uint32]
    first: int
    last: int

    def tensor(self) -> Tensor:
        """The ids as a model takes them."""
        return torch.from_numpy(self.ids.astype(np.int64))


class Encoder:
    """Settings of the encoder; its model is made only when it is needed."""

    def __init__(self, setup: Setup) -> None:
        section = setup.training.latent_edit
        assert section is not None  # noqa: S101 - a rule of the manifest
        self.settings: EditEncoder = section.encoder
        self._setup = setup

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The file's tokenizer."""
        return load_tokenizer(self._setup.training.tokenizer, self._setup.base_directory)

    @cached_property
    def plan(self) -> ModelPlan:
        """The file's model. Raises ModelError."""
        return plan_model(
            self._setup.training.model,
            base_directory=self._setup.base_directory,
            vocab_size=self.tokenizer.vocab_size,
        )

    @cached_property
    def layer(self) -> int:
        """The hidden states that are pooled. Raises ModelError for a layer that the model has not."""
        config = self.plan.require_config().get_text_config()
        layers = int(config.num_hidden_layers)
        layer = layers if self.settings.layer is None else self.settings.layer
        if layer > layers:
            what, why = f"{layer} is above {layers}", "the model has so many layers"
            raise ModelError(
                Problem(f"{_SECTION}.layer", what, why, f"Use at most {layers}")
            )
        return layer

    @cached_property
    def width(self) -> int:
        """Numbers of a state, as the configuration says."""
        return int(self.plan.require_config().get_text_config().hidden_size)

    @cached_property
    def identity(self) -> str:
        """SHA-256 that is equal where states are: of weights, tokenizer, and how states are made.

        Raises ModelError where the weights are not those that the file asks for.
        """
        settings = self.settings
        weights: dict[str, str] = {}
        if self.plan.weights is not None:
            files = sorted(self.plan.weights.glob("*.safetensors"))
            weights = {path.name: hash_file(path) for path in files}
        # A file that names the hash of its weights means no others.
        wanted = settings.weight_hash
        if wanted is not None:
            found, name = "", "no file of weights"
            if self.plan.weights is not None:
                index = self.plan.weights / "model.safetensors.index.json"
                path = index if index.is_file() else self.plan.weights / next(iter(weights))
                found, name = hash_file(path), str(path)
            if found != wanted[-64:]:
                what = f"{name} has the SHA-256 {found}" if found else f"there is {name}"
                why = f"the file asks for {wanted[-64:]}"
                remedy = "Use the encoder that is meant, or correct weightHash"
                raise ModelError(Problem(f"{_SECTION}.weightHash", what, why, remedy))

        facts: dict[str, Any] = {
            "model": self._describe_model(),
            "weights": weights,
            "tokenizer": self.tokenizer.identity,
            "layer": self.layer,
            "pooling": settings.pooling,
            "radius": self._radius,
            "normalize": settings.normalize,
            "dtype": settings.dtype,
            "prefix": settings.prefix,
            "suffix": settings.suffix,
            "padTo": settings.pad_to,
            "states": 1,
        }
        if not weights:
            facts["seed"] = self._setup.training.reproducibility.seed
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _describe_model(self) -> dict[str, Any]:
        """The configuration as the run began with it, or as it is now where that is another one.

        A key that another version of transformers has changes no state, and its run keeps what it has made.
        """
        now = self.plan.describe()
        config: dict[str, Any] = now["config"]
        if self._setup.run_directory is None:
            return config
        directory = RunDirectory(self._setup.run_directory)
        record = directory.read_resolved() or {}
        latest = read_optional(directory, record, "model", ModelRecord)
        first = read_optional(directory, record, FIRST_MODEL, ModelRecord) or latest
        if latest is None or first is None:
            return config
        # With the latest start, too: it may know keys of now that the first one did not.
        for before in (latest, first):
            old, new = comparable_configs(dataclasses.asdict(before), now)
            if old != new:
                return config
        return first.config

    def build(self) -> nn.Module:
        """The model, frozen and in the mode of evaluation. Raises ModelError."""
        seed = self._setup.training.reproducibility.seed
        # In fp32 whatever the run's precision is: its rounding is the encoder's own.
        model: nn.Module = build_model(self.plan, seed=seed, precision="fp32")
        model.to(_DTYPES[self.settings.dtype])
        return model.requires_grad_(False).eval()

    def tokenize(self, sequence: bytes, focus: int | None) -> Tokens:
        """The tokens of a sequence. ``focus``: base around which is pooled; None for all of them.

        Raises DataError for a sequence that has more tokens than the model has positions.
        """
        settings = self.settings
        filling = b"A" * (-len(sequence) % settings.pad_to)
        text = f"{settings.prefix}{(sequence + filling).decode()}{settings.suffix}"
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        starts = [start for start, _ in offsets]
        begin = len(settings.prefix)
        first = _token_of(starts, begin)
        last = _token_of(starts, begin + len(sequence) - 1) + 1
        if focus is not None and settings.pooling == "centeredMean":
            middle = _token_of(starts, begin + focus)
            first, last = (
                max(first, middle - self._radius),
                min(last, middle + self._radius + 1),
            )
        most = getattr(
            self.plan.require_config().get_text_config(), "max_position_embeddings", None
        )
        if most is not None and len(ids) > most:
            what = f"a window has {len(ids)} tokens"
            why = f"the encoder has {most} positions"
            remedy = "Use shorter windows, or an encoder with more positions"
            raise DataError(Problem("spec.training.latentEdit.corpus", what, why, remedy))
        return Tokens(np.array(ids, dtype=np.uint32), first, last)

    @property
    def _radius(self) -> int:
        if self.settings.pooling == "globalMean":
            return 0
        return _RADIUS if self.settings.radius is None else self.settings.radius


def _token_of(starts: list[int], character: int) -> int:
    """The token that a character belongs to."""
    return max(0, bisect_right(starts, character) - 1)


@torch.no_grad()
def encode(
    model: nn.Module, ids: Tensor, span: tuple[int, int], *, layer: int, normalize: bool
) -> Tensor:
    """The state of one sequence, [width] in fp32. ``ids``: its tokens, on the model's device."""
    # Without the head, and never in another precision than that of the weights.
    body: Any = getattr(model, "base_model", model)
    with torch.autocast(ids.device.type, enabled=False), single_thread(ids.device):
        output = body(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        first, last = span
        state: Tensor = output.hidden_states[layer][0, first:last].float().mean(0)
        return functional.normalize(state, dim=0) if normalize else state


@contextmanager
def single_thread(device: torch.device) -> Iterator[None]:
    """One thread of the processor: sums of several would depend on their number, and a process that has
    started them cannot be forked."""
    if device.type != "cpu" or (before := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Builds a model without memory for its weights, and creates the weights one by one after sharding.

The weights are bitwise equal to the weights of :func:`evergrad_trainer.models.build.build_model`. The
operations that fill a parameter are recorded while the model is built on the meta device. They are replayed
in the same order, so that the generator gives the same numbers. A process holds one whole tensor at a time,
and keeps only its shard of it.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from evergrad_trainer.base.torch_private import TorchDispatchMode, tensors_in
from evergrad_trainer.models.build import DTYPES, ModelPlan, change_model
from evergrad_trainer.models.randomness import Purpose, keyed_seed
from evergrad_trainer.models.stored_files import INDEX, SINGLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_aten = torch.ops.aten
_DRAWS = frozenset({_aten.normal_, _aten.uniform_})
_REPLAYABLE = _DRAWS | {_aten.zero_, _aten.fill_}
Weights = Iterator[tuple[str, torch.Tensor]]
"""Iterates over names of parameters and their whole values on the CPU, which are created lazily."""


@dataclass(frozen=True)
class _Fill:
    """An in-place operation on a part of a storage."""

    operation: Any
    storage: torch.UntypedStorage
    """The storage. The reference keeps it alive, because the address of a freed storage could be reused."""
    length: int
    """Number of elements of the whole storage."""
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset of the part, in elements."""
    dtype: torch.dtype
    arguments: tuple[Any, ...]

    @property
    def key(self) -> int:
        return int(self.storage._cdata)

    @property
    def is_draw(self) -> bool:
        return self.operation.overloadpacket in _DRAWS

    @property
    def is_whole(self) -> bool:
        """Whether the operation overwrites the whole storage."""
        return torch.Size(self.part[0]).numel() == self.length


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records in-place operations on tensors without memory.

    ``is_replayable`` becomes false at the first operation that cannot be replayed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fills: list[_Fill] = []
        self.is_replayable = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor) and target.is_meta:
            self.is_replayable &= func.overloadpacket in _REPLAYABLE and not kwargs
            storage = target.untyped_storage()
            length = storage.nbytes() // target.dtype.itemsize
            part = (tuple(target.shape), target.stride(), int(target.storage_offset()))
            self.fills.append(
                _Fill(func, storage, length, part, target.dtype, tuple(args[1:]))
            )
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Dispatch mode that raises NotImplementedError if code reads or changes a tensor without memory.

    Otherwise, a copy of such a tensor would silently have no values, and a change would be lost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_allowed = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow such operations while a model without memory is built."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tensors_in((args, kwargs))
        if not self._is_allowed and any(one.is_meta for one in given):
            raise NotImplementedError(f"{func} of a weight that does not exist yet")
        return func(*args, **(kwargs or {}))


class DeferredModel:
    """A model on the meta device, with real buffers, and the operations that fill its parameters."""

    def __init__(self, model: "PreTrainedModel", fills: list[_Fill], seed: int) -> None:
        self.model = model
        self.weights: Weights | None = None
        """Values that :meth:`materialise` writes to the parameters. If None, they stay uninitialised."""
        self._fills = fills
        self._seed = seed
        # Remember the names by storage now, because sharding replaces the parameters.
        self._names = {
            p.untyped_storage()._cdata: name for name, p in model.named_parameters()
        }

    def materialise(
        self,
        device: torch.device,
        *,
        on_whole: Callable[[nn.Parameter, torch.Tensor], None] | None = None,
    ) -> None:
        """Allocate the parameters on ``device``, whether sharded or not, and fill them with their values.

        ``on_whole`` is called with each parameter and its whole value, which is not available later.
        """
        made: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            # Allocate all parameters first: values are created in another order than the order of modules.
            for module in self.model.modules():
                for name, old in module._parameters.items():
                    if old is not None:
                        # Keep weights that two modules share shared; ``to_empty`` would separate them.
                        if id(old) not in made:
                            empty = torch.empty_like(old, device=device)
                            made[id(old)] = nn.Parameter(empty, old.requires_grad)
                        module._parameters[name] = made[id(old)]
            # Move the buffers. This call also makes FSDP2 replace its sharded parameters with the new ones.
            self.model.to(device)  # type: ignore[arg-type]

            # Fill one whole tensor at a time, so that a process never holds the whole model.
            parameters = dict(self.model.named_parameters())
            for name, whole in self.weights or ():
                target = parameters[name]
                values = whole.to(device, target.dtype)
                if on_whole is not None:
                    on_whole(target, values)
                if isinstance(target, DTensor):
                    # Without a source rank, each rank shards its own copy and nothing is sent.
                    mesh, cut = target.device_mesh, target.placements
                    values = distribute_tensor(values, mesh, cut, src_data_rank=None)
                target.copy_(values)

    def initial_weights(self) -> Weights:
        """Yield the initial weights, which depend only on the seed, from a separate generator.

        Draws that are overwritten later are replayed too, because later draws depend on them.
        """
        generator = torch.Generator().manual_seed(
            keyed_seed(self._seed, 0, 0, Purpose.INITIAL_WEIGHTS)
        )
        # Skip operations before a tensor is first filled as a whole, because that overwrites their values.
        first = {fill.key: index for index, fill in enumerate(self._fills) if fill.is_whole}
        last = {fill.key: index for index, fill in enumerate(self._fills)}
        values: dict[int, torch.Tensor] = {}
        for index, fill in enumerate(self._fills):
            is_kept = fill.key in self._names and index >= first[fill.key]
            if not is_kept and not fill.is_draw:
                continue
            whole = values.get(fill.key)
            if whole is None:
                whole = torch.empty(fill.length, dtype=fill.dtype)
            part = whole.as_strided(*fill.part)
            fill.operation(
                part, *fill.arguments, **({"generator": generator} if fill.is_draw else {})
            )
            if is_kept:
                values[fill.key] = whole
            # Yield a tensor after its last operation, so that few tensors are in memory at the same time.
            if is_kept and index == last[fill.key]:
                yield (
                    self._names[fill.key],
                    values.pop(fill.key).as_strided(*self._fills[first[fill.key]].part),
                )

    def stored_weights(self, directory: Path) -> Weights | None:
        """Return the weights of a transformers directory; None if names or shapes differ from the model's."""
        from safetensors import safe_open

        shapes = {
            name: parameter.shape for name, parameter in self.model.named_parameters()
        }
        index = directory / INDEX
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))[
                "weight_map"
            ]
        elif (directory / SINGLE).exists():
            with safe_open(directory / SINGLE, framework="pt") as file:
                files = dict.fromkeys(file.keys(), SINGLE)
        else:
            return None
        if not shapes.keys() <= files.keys():
            return None

        def read() -> Weights:
            for name in shapes:
                with safe_open(directory / files[name], framework="pt") as file:
                    yield name, file.get_tensor(name)

        # Check all shapes before the first tensor is read: filled shards cannot become a whole model again.
        for name, shape in shapes.items():
            with safe_open(directory / files[name], framework="pt") as file:
                if tuple(file.get_slice(name).get_shape()) != tuple(shape):
                    return None
        return read()


def defer_model(
    plan: ModelPlan, *, seed: int, precision: str, with_weights: bool = True
) -> DeferredModel | None:
    """Build the planned model without memory for its weights. Returns None if this is not possible.

    It is not possible if the values of the weights cannot be created one by one. ``with_weights=False`` is
    for a checkpoint that overwrites the weights. In this case, a model whose stored weights cannot be used is
    returned too, and its ``weights`` are None.
    """
    # LoRA is not supported: its frozen weights are hashed while they are whole, and the initial adapters use
    # separate draws.
    if plan.config is None or plan.settings.lora is not None:
        return None
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    # Build on the meta device under a recorder, and check that the global generator does not advance.
    before = torch.get_rng_state()
    with _parameters_without_memory(), _Recorder() as recorder:
        model = AutoModelForCausalLM.from_config(
            plan.config, dtype=DTYPES[precision], attn_implementation=plan.attention
        )
        model.tie_weights()
    # If another operation drew a number, all later draws would differ.
    is_replayable = recorder.is_replayable and torch.equal(before, torch.get_rng_state())
    filled = {fill.key for fill in recorder.fills if fill.is_whole}
    keys = [parameter.untyped_storage()._cdata for parameter in model.parameters()]
    if not is_replayable or not filled.issuperset(keys):
        return None
    model.config.use_cache = False
    change_model(model, plan, seed=seed, precision=precision)
    model.train()
    deferred = DeferredModel(model, recorder.fills, seed)
    # Values are created or read only when materialise iterates over them.
    deferred.weights = (
        deferred.initial_weights()
        if plan.weights is None
        else deferred.stored_weights(plan.weights)
    )
    return None if with_weights and deferred.weights is None else deferred


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Move each parameter to the meta device when it is registered.

    Buffers stay real, because they could not be computed again later.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:
            attributes = vars(parameter)
            moved = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
            vars(moved).update(attributes)
            self._parameters[name] = moved

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

"""A model without memory for its weights, which are made one by one after it has been cut into shards.

Its weights have the bits that :func:`evergrad_trainer.models.build.build_model` gives them. The operations
that fill a parameter are recorded while the model is built on the meta device, and replayed in the same
order, so that the generator's numbers are the same ones; a process holds one whole tensor at a time, and
keeps its part of it.
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
"""Names of parameters, each with its whole value on the CPU, made when it is asked for."""


@dataclass(frozen=True)
class _Fill:
    """One operation in place on a part of a storage."""

    operation: Any
    storage: torch.UntypedStorage
    """Kept alive: the address of one that was freed could be given to another tensor."""
    length: int
    """Elements of the whole storage."""
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset."""
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
        """Whether nothing is left of what stood there before."""
        return torch.Size(self.part[0]).numel() == self.length


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records what is done in place to tensors without memory.

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
    """Dispatch mode that ends with NotImplementedError what reads or changes a tensor without memory.

    A copy of such a tensor would have no values either, and a change of it would be lost, without a word.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_allowed = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """While a model without memory is made."""
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
            raise NotImplementedError(f"{func} of a weight that is not there yet")
        return func(*args, **(kwargs or {}))


class DeferredModel:
    """``model`` on the meta device (its buffers are real), and what fills its parameters."""

    def __init__(self, model: "PreTrainedModel", fills: list[_Fill], seed: int) -> None:
        self.model = model
        self.weights: Weights | None = None
        """Values that :meth:`materialise` fills the parameters with; without it they are left as they
        are in memory."""
        self._fills = fills
        self._seed = seed
        # As they are before sharding replaces them.
        self._names = {
            p.untyped_storage()._cdata: name for name, p in model.named_parameters()
        }

    def materialise(
        self,
        device: torch.device,
        *,
        on_whole: Callable[[nn.Parameter, torch.Tensor], None] | None = None,
    ) -> None:
        """Give the parameters, sharded by now or not, memory on ``device`` and their values.

        ``on_whole`` is given each parameter with its whole value, which no process holds later.
        """
        made: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            # Memory first, for all parameters: values are made in an order that is not that of the modules.
            for module in self.model.modules():
                for name, old in module._parameters.items():
                    if old is not None:
                        # Two modules that share a weight go on sharing it, which ``to_empty`` would not let
                        # them.
                        if id(old) not in made:
                            empty = torch.empty_like(old, device=device)
                            made[id(old)] = nn.Parameter(empty, old.requires_grad)
                        module._parameters[name] = made[id(old)]
            # Moves the buffers; and FSDP2 takes over the new parameters in the place of those it has cut.
            self.model.to(device)  # type: ignore[arg-type]

            # Values, one whole tensor at a time: a process never holds the model whole.
            parameters = dict(self.model.named_parameters())
            for name, whole in self.weights or ():
                target = parameters[name]
                values = whole.to(device, target.dtype)
                if on_whole is not None:
                    on_whole(target, values)
                if isinstance(target, DTensor):
                    # Without a source rank each one cuts its own copy, and nothing is sent.
                    mesh, cut = target.device_mesh, target.placements
                    values = distribute_tensor(values, mesh, cut, src_data_rank=None)
                target.copy_(values)

    def initial_weights(self) -> Weights:
        """The weights of a fresh model, a function of the seed alone, from a generator of their own.

        A draw that is overwritten later is made all the same: the numbers of those after it depend on it.
        """
        generator = torch.Generator().manual_seed(
            keyed_seed(self._seed, 0, 0, Purpose.INITIAL_WEIGHTS)
        )
        # Values from before a tensor was filled whole are of no use; only those that come after that count.
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
            # Given out as soon as nothing more is done to it, so that few tensors are in memory at a time.
            if is_kept and index == last[fill.key]:
                yield (
                    self._names[fill.key],
                    values.pop(fill.key).as_strided(*self._fills[first[fill.key]].part),
                )

    def stored_weights(self, directory: Path) -> Weights | None:
        """The weights of a transformers directory; None where its names or shapes are not the model's own."""
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

        # Before the first tensor is read: once shards are filled there is no way back to a whole model.
        for name, shape in shapes.items():
            with safe_open(directory / files[name], framework="pt") as file:
                if tuple(file.get_slice(name).get_shape()) != tuple(shape):
                    return None
        return read()


def defer_model(
    plan: ModelPlan, *, seed: int, precision: str, with_weights: bool = True
) -> DeferredModel | None:
    """The planned model without memory for its weights; None where their values cannot be made one by one.

    ``with_weights=False`` is for a checkpoint that is loaded over them: then a model whose values cannot be
    made will do, and its ``weights`` are None.
    """
    # The frozen weights beside adapters are hashed while they are whole, and adapters begin with draws of
    # their own.
    if plan.config is None or plan.settings.lora is not None:
        return None
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    # Built on the meta device under a recorder; the global generator must stay where it is.
    before = torch.get_rng_state()
    with _parameters_without_memory(), _Recorder() as recorder:
        model = AutoModelForCausalLM.from_config(
            plan.config, dtype=DTYPES[precision], attn_implementation=plan.attention
        )
        model.tie_weights()
    # A number drawn for something else would have moved all that come after it.
    is_replayable = recorder.is_replayable and torch.equal(before, torch.get_rng_state())
    filled = {fill.key for fill in recorder.fills if fill.is_whole}
    keys = [parameter.untyped_storage()._cdata for parameter in model.parameters()]
    if not is_replayable or not filled.issuperset(keys):
        return None
    model.config.use_cache = False
    change_model(model, plan, seed=seed, precision=precision)
    model.train()
    deferred = DeferredModel(model, recorder.fills, seed)
    # Nothing is made or read before somebody asks for the first one.
    deferred.weights = (
        deferred.initial_weights()
        if plan.weights is None
        else deferred.stored_weights(plan.weights)
    )
    return None if with_weights and deferred.weights is None else deferred


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Put each parameter on the meta device as its module gets it.

    Buffers stay real: nothing would compute them again.
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

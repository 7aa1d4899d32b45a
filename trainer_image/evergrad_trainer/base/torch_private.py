"""Every private name of torch that Evergrad uses, each with the reason; a test per supported torch holds
them."""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Container
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch, _pytree

_COMPILER = "torch._dynamo"
_SIZES = "torch.fx.experimental.symbolic_shapes"

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of a class that sees each operation before it runs. torch documents it and has no public name
for it."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in the arguments of an operation, in lists and tuples of them, too.

    torch's own modes look for them in this way, and no public name does.
    """
    return [one for one in _pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]


def reset_group_counter() -> None:
    """Make this process meet fresh ones again after an ``init_process_group`` that failed.

    torch counts groups and puts the number into the store keys under which members meet. A failed set-up
    leaves it raised, and there is nothing to destroy that would set it back.
    """
    distributed_c10d._world.group_count = 0


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give later operations of ``group`` another timeout than the one it was set up with."""
    distributed_c10d._set_pg_timeout(timeout, group)


def abort_groups() -> None:
    """Free the threads of this process that wait in NCCL; gloo has no such call."""
    distributed_c10d._abort_process_group()


_kept_groups: list[dist.ProcessGroup] = []
"""Process groups that are never destroyed in this process."""


class _KeptGroups(dict[dist.ProcessGroup, Any]):
    """torch's map of the process groups that it knows; each that enters is kept."""

    def __setitem__(self, group: dist.ProcessGroup, value: Any) -> None:
        _kept_groups.append(group)
        super().__setitem__(group, value)


def keep_groups() -> None:
    """Keep a reference to every process group that this process makes from here on, until it exits.

    The last reference to a group may belong to DDP's reducer, whose destructor holds the GIL while it joins
    the threads of gloo; such a thread may wait for the GIL to free the objects of a collective that has
    finished. No public hook sees groups before ``destroy_process_group`` drops them. The price is the threads
    and sockets of groups that the process has destroyed, which it has until it exits.
    """
    if not isinstance(distributed_c10d._pg_map, _KeptGroups):
        distributed_c10d._pg_map = _KeptGroups(distributed_c10d._pg_map)


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all ``tensors`` by ``factor``, in place: a few kernels in all, where a loop would launch one
    for each.

    torch's own clipping calls the same name; it has no public one.
    """
    torch._foreach_mul_(tensors, factor)


def record_memory(max_entries: int | None) -> None:
    """Begin to keep the newest allocations of the accelerator's memory; None: stop, and forget them."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory(path: str) -> None:
    """Write what is kept of the allocations, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def has_foreign_weights(module: Any) -> bool:
    """Whether one of the weights that FSDP2 has cut for ``module`` has another in its place.

    FSDP2 puts its own there when the module is called, without a word. No public name tells them apart.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for managed in group.fsdp_params:
            place = managed._module_info
            current = place.module._parameters.get(place.param_name)
            whole = getattr(managed, "_unsharded_param", None)
            if current is not managed.sharded_param and current is not whole:
                return True
    return False


def gather_as(
    module: Any, chosen: Container[tuple[nn.Module, str]], dtype: torch.dtype
) -> None:
    """Let FSDP2 gather the ``chosen`` of the weights that it has cut for ``module`` in the type ``dtype``.

    ``chosen``: weights by module and name. Their gradients come in that type, too, and are added up over
    ranks in fp32. To be called before the first call of ``module``.

    FSDP2 gathers weights in groups, and each group has types of its own; but ``fully_shard`` makes a second
    group only for weights of another process group.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    groups = module._get_fsdp_state()._fsdp_param_groups
    for group in tuple(groups):
        own: list[Any] = []
        rest: list[Any] = []
        for one in group.fsdp_params:
            place = one._module_info
            (own if (place.module, place.param_name) in chosen else rest).append(one)
        policy = dataclasses.replace(
            group.mp_policy, param_dtype=dtype, reduce_dtype=torch.float32
        )
        if own and rest:
            group.fsdp_params = rest
            group = FSDPParamGroup(
                [],
                group.modules,
                group.mesh_info,
                group.post_forward_mesh_info,
                group.device,
                None,
                policy,
                group.offload_policy,
            )
            group.fsdp_params = own
            groups.append(group)
        elif own:
            group.mp_policy = policy


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether something is called with the gradient of ``parameter``. No public name tells."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def forget_passes(module: Any) -> None:
    """Drop what FSDP2 remembers of passes that no backward pass has followed: a list that would grow.

    Nothing is done for the parts of a module, nor for one that was not called yet, of which torch's public
    name for it knows nothing.
    """
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


def wrap_call(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put ``wrap`` around what a call of ``module`` computes: around its graph where it is compiled.

    ``Module.compile`` traces whatever stands around ``forward``, and has no public place outside of that.
    """
    if module._compiled_call_impl is None:
        module.forward = wrap(module.forward)
    else:
        module._compiled_call_impl = wrap(module._compiled_call_impl)


def attention_backend(query: torch.Tensor, key: torch.Tensor) -> str:
    """Name the backend of causal attention that torch takes for these tensors, [1, heads, tokens, size].

    torch tells what could be used for an accelerator alone, and what it would use nowhere. Raises
    RuntimeError where no backend that is switched on can do it.
    """
    is_grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=is_grouped)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(chosen, "other")


def import_slow_parts() -> None:
    """Import what the first optimizer step of a process, and torch's log formatter at the first error,
    import: seconds. Not what this process delays."""
    import torch._dynamo  # noqa: F401 - for those who import it later


def delay_compiler() -> None:
    """Let torch's compiler, and the algebra of unknown sizes, be imported by their first real use, not by
    everything that may use them.

    transformers, torch's own optimizers and its DTensor import them in every process, for decorators and
    questions that mean something to compiled code alone: a second or two of each start. Nothing changes where
    one has been imported already. Not for a process that forks others which will compile or shard: each of
    them would import it again.
    """
    compiler = _delay(_COMPILER, _DelayedCompiler)
    if compiler is not None:
        # transformers' attention masks take a class from this part, which needs no other.
        importlib.import_module(f"{_COMPILER}._trace_wrapped_higher_order_op")
        # Any further part is a use of the compiler: they import each other through the whole.
        sys.meta_path.insert(0, _PartsAfterTheWhole())
    _delay(_SIZES, _DelayedSizes)


def _delay(name: str, kind: "type[_Delayed]") -> Any:
    """Put a module in the place of ``name`` whose code runs at its first use; None where there is no such
    place."""
    if name in sys.modules:
        return None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    module.__class__ = kind
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)
    return module


class _Delayed(types.ModuleType):
    """A module before its code has run. A name that its class does not have runs it, in this same module."""

    def __getattr__(self, name: str) -> Any:
        # Others look for such names in every module (inspect, warnings): no use of it.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(self), name)


class _DelayedCompiler(_Delayed):
    """torch's compiler before its code has run.

    It answers what is asked of it at imports, when groups are set up and in eager steps, with torch's names
    of parameters. A request from before it is loaded takes effect then.
    """

    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    """The cache that a new process group clears: nothing is kept yet."""

    def graph_break(self, msg: str = "") -> None:
        """End the graph that is being traced: there is none."""

    def allow_in_graph(self, fn: Any) -> Any:
        """Leave a call of ``fn`` as it is in graphs: noted until there are graphs."""
        _noted.append(("allow_in_graph", fn))
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        """Trace ``fn`` as a constant: noted until there are graphs."""
        _noted.append(("assume_constant_result", fn))
        return fn

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Keep ``fn`` from being traced, from the moment that anything can be."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if not isinstance(fn, types.FunctionType):
            return getattr(_load(self), "disable")(fn, recursive, **options)  # noqa: B009 - a class of this module has the name, too
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # There from the compiler's own code on, which another thread may be running.
            loaded = vars(self).get("disable")
            if loaded is None:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(loaded(fn, recursive, **options))
            return disabled[0](*args, **kwargs)

        return call


class _PartsAfterTheWhole(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the parts of a delayed compiler, by an import of the whole.

    The whole imports most of its parts. An import that ran one of them once more would leave two of it: a
    setting of ``torch._dynamo.config`` in one that nobody reads, and an error that nobody catches.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A specification whose module is made by :meth:`create_module`; None for all else."""
        whole = sys.modules.get(_COMPILER)
        if not fullname.startswith(f"{_COMPILER}.") or not isinstance(whole, _Delayed):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The part as it is once the whole has been imported."""
        _load(sys.modules[_COMPILER])
        part = importlib.import_module(spec.name)
        spec.loader_state = part.__spec__
        return part

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: its code has run. Only its specification was replaced, where it lets that be done."""
        current = module.__spec__
        if current is not None and current.loader is self:
            module.__spec__ = current.loader_state


class _DelayedSizes(_Delayed):
    """torch's algebra of sizes that are not known, before its code has run.

    Half a second, of which sympy is most. DTensor takes these names of it at its import, and asks them of
    sizes that are known: such questions are answered here.
    """

    def guard_or_false(self, a: Any) -> Any:
        """``a`` where it is known."""
        return a if type(a) is bool else getattr(_load(self), "guard_or_false")(a)  # noqa: B009 - as above

    def guard_or_true(self, a: Any) -> Any:
        """``a`` where it is known."""
        return a if type(a) is bool else getattr(_load(self), "guard_or_true")(a)  # noqa: B009 - as above

    def statically_known_true(self, x: Any) -> Any:
        """``x`` where it is known."""
        return x if type(x) is bool else getattr(_load(self), "statically_known_true")(x)  # noqa: B009 - as above

    class GuardOnDataDependentSymNode(RuntimeError):  # noqa: N818 - torch's name
        """Stands for torch's error until there can be one, in modules that catch it."""


_noted: list[tuple[str, Any]] = []
_loading = threading.RLock()


def _load(module: types.ModuleType) -> types.ModuleType:
    """Run the module's own code in it, once."""
    # Reentrant: its code imports parts of itself, which ask the module for what it has by then.
    with _loading:
        if not isinstance(module, _Delayed):
            return module
        spec: Any = module.__spec__
        kind = type(module)
        module.__class__ = types.ModuleType  # type: ignore[assignment]
        try:
            spec.loader.exec_module(module)
        except BaseException:
            # Half a module would fail elsewhere, with an error that says nothing: the next use tries again.
            module.__class__ = kind
            raise
        if kind is _DelayedCompiler:
            while _noted:
                name, function = _noted.pop()
                getattr(module, name)(function)
        if kind is _DelayedSizes:
            # Modules that have taken a name of the delayed one get what it stands for now.
            for name, stand_in in vars(_DelayedSizes).items():
                if name.startswith("__"):
                    continue
                for taker in list(sys.modules.values()):
                    taken = getattr(taker, "__dict__", {}).get(name)
                    if getattr(taken, "__func__", taken) is stand_in:
                        setattr(taker, name, getattr(module, name))
    return module


def group_state() -> tuple[int, Any]:
    """(number of groups counted, the default group): what a test of a failed set-up looks at."""
    return distributed_c10d._world.group_count, distributed_c10d._world.default_pg

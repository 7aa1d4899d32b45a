"""Every private torch API that Evergrad uses, with the reason for each. A test checks them against every
supported version of torch."""

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
"""Base class for an object that intercepts each operation before it runs. torch documents the class but has
no public name for it."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments of an operation, including tensors in nested lists and tuples.

    torch's own dispatch modes search arguments with this function. It has no public equivalent.
    """
    return [one for one in _pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]


def reset_group_counter() -> None:
    """Reset torch's group counter so that this process can join new processes after a failed set-up.

    torch counts process groups and includes the number in the store keys that members use to find each
    other. If ``init_process_group`` fails, the counter stays incremented, and no group exists whose
    destruction would reset it.
    """
    distributed_c10d._world.group_count = 0


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of later operations of ``group``, replacing the timeout from its set-up."""
    distributed_c10d._set_pg_timeout(timeout, group)


def abort_groups() -> None:
    """Release the threads of this process that are blocked in NCCL. gloo has no equivalent call."""
    distributed_c10d._abort_process_group()


_kept_groups: list[dist.ProcessGroup] = []
"""Process groups that are never destroyed in this process."""


class _KeptGroups(dict[dist.ProcessGroup, Any]):
    """A replacement for torch's map of process groups that also keeps a reference to each added group."""

    def __setitem__(self, group: dist.ProcessGroup, value: Any) -> None:
        _kept_groups.append(group)
        super().__setitem__(group, value)


def keep_groups() -> None:
    """Keep a reference to every process group that this process creates from now on, until it exits.

    This prevents a deadlock. The last reference to a group may belong to DDP's reducer, whose destructor
    holds the GIL while it joins gloo's threads. Such a thread may itself wait for the GIL to free the objects
    of a finished collective. torch has no public hook that runs before ``destroy_process_group`` drops a
    group. As a cost, the threads and sockets of destroyed groups remain until the process exits.
    """
    if not isinstance(distributed_c10d._pg_map, _KeptGroups):
        distributed_c10d._pg_map = _KeptGroups(distributed_c10d._pg_map)


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all ``tensors`` by ``factor``, in place.

    This launches a few kernels in total; a loop would launch one kernel per tensor. torch's gradient clipping
    calls the same function, which has no public name.
    """
    torch._foreach_mul_(tensors, factor)


def record_memory(max_entries: int | None) -> None:
    """Record the newest ``max_entries`` allocations of accelerator memory.

    If ``max_entries`` is None, stop recording and drop the recorded allocations.
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory(path: str) -> None:
    """Write the recorded allocations to ``path``, in the format of https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def has_foreign_weights(module: Any) -> bool:
    """Return whether another tensor has replaced one of the weights that FSDP2 sharded for ``module``.

    When the module is called, FSDP2 silently puts its own weight back, so the replacement would be lost. No
    public API distinguishes the two.
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
    """Make FSDP2 gather the ``chosen`` weights of ``module`` as ``dtype``.

    ``chosen`` contains pairs of submodule and parameter name, such as ``(block.linear, "weight")``. The
    gradients of these weights also have the type ``dtype`` and are summed over ranks in fp32. Call this
    function before the first call of ``module``.

    FSDP2 gathers weights in groups, and each group has its own types. However, ``fully_shard`` creates a
    second group only for weights of another process group, so this function splits the groups itself.
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
    """Return whether ``parameter`` has gradient hooks. torch has no public API for this check."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def forget_passes(module: Any) -> None:
    """Drop FSDP2's records of forward passes without a backward pass, so that the list does not grow.

    Does nothing for a submodule or for a module that has not been called yet. torch's public method does not
    support either case.
    """
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


def wrap_call(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap the call of ``module`` with ``wrap``. If the module is compiled, wrap its compiled graph.

    ``Module.compile`` also traces any wrapper of ``forward`` and has no public hook outside the graph.
    """
    if module._compiled_call_impl is None:
        module.forward = wrap(module.forward)
    else:
        module._compiled_call_impl = wrap(module._compiled_call_impl)


def attention_backend(query: torch.Tensor, key: torch.Tensor) -> str:
    """Return the name of the backend that torch selects for causal attention on these tensors.

    ``query`` and ``key`` have the shape ``[1, heads, tokens, size]``. The result is ``math``, ``flash``,
    ``efficient``, ``cudnn`` or ``other``. torch's public API reports only which backends an accelerator could
    use, not the selected backend. Raises RuntimeError if no enabled backend supports the tensors.
    """
    is_grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=is_grouped)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(chosen, "other")


def import_slow_parts() -> None:
    """Import the modules that torch would otherwise import at the first optimizer step or the first logged
    error, which takes seconds. A delayed compiler (see :func:`delay_compiler`) stays delayed."""
    import torch._dynamo  # noqa: F401 - later imports find it in sys.modules


def delay_compiler() -> None:
    """Delay the import of torch's compiler and its symbolic-shapes module until their first real use.

    transformers, torch's optimizers and DTensor import both modules in every process, for decorators and
    checks that only affect compiled code. These imports take one to two seconds at each start. A module that
    has already been imported is left as it is. Do not call this in a process that forks processes that
    compile or shard, because each of them would import the modules again.
    """
    compiler = _delay(_COMPILER, _DelayedCompiler)
    if compiler is not None:
        # transformers' attention masks use a class from this submodule, which imports without the compiler.
        importlib.import_module(f"{_COMPILER}._trace_wrapped_higher_order_op")
        # Importing any other submodule counts as a use of the compiler, because the submodules import each
        # other through the package.
        sys.meta_path.insert(0, _PartsAfterTheWhole())
    _delay(_SIZES, _DelayedSizes)


def _delay(name: str, kind: "type[_Delayed]") -> Any:
    """Register a module under ``name`` whose code runs at its first use, and return the module.

    Returns None if ``name`` has already been imported or does not exist.
    """
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
    """A module whose code has not run yet. Access to a name that this class does not define runs the code, in
    the same module object."""

    def __getattr__(self, name: str) -> Any:
        # inspect and warnings look up such names in every module. That is not a use of this module.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(self), name)


class _DelayedCompiler(_Delayed):
    """A stand-in for torch's compiler until its code runs.

    It implements the functions that torch calls during imports, group set-up and eager steps, with torch's
    parameter names. A call made before the compiler is loaded takes effect when it is loaded.
    """

    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    """Holds the cache that a new process group clears. It is empty until the compiler is loaded."""

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, because no graph is being traced."""

    def allow_in_graph(self, fn: Any) -> Any:
        """Keep calls of ``fn`` untraced in graphs. The request is recorded until the compiler is loaded."""
        _noted.append(("allow_in_graph", fn))
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        """Trace ``fn`` as a constant. The request is recorded until the compiler is loaded."""
        _noted.append(("assume_constant_result", fn))
        return fn

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Prevent the tracing of ``fn``, starting when the compiler is loaded."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if not isinstance(fn, types.FunctionType):
            return getattr(_load(self), "disable")(fn, recursive, **options)  # noqa: B009 - a class of this module has the name, too
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The compiler's own code defines this name. Another thread may be running that code now.
            loaded = vars(self).get("disable")
            if loaded is None:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(loaded(fn, recursive, **options))
            return disabled[0](*args, **kwargs)

        return call


class _PartsAfterTheWhole(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds submodules of a delayed compiler by importing the whole package first.

    The package imports most of its submodules. If an import ran a submodule a second time, two copies of the
    submodule would exist: a setting in the unused copy of ``torch._dynamo.config`` would have no effect, and
    an ``except`` clause for one copy's error class would not catch the other copy's errors.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec whose module comes from :meth:`create_module`, or None for any other module."""
        whole = sys.modules.get(_COMPILER)
        if not fullname.startswith(f"{_COMPILER}.") or not isinstance(whole, _Delayed):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Import the whole package and return its submodule."""
        _load(sys.modules[_COMPILER])
        part = importlib.import_module(spec.name)
        spec.loader_state = part.__spec__
        return part

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the submodule's own spec if the import replaced it. Its code has already run."""
        current = module.__spec__
        if current is not None and current.loader is self:
            module.__spec__ = current.loader_state


class _DelayedSizes(_Delayed):
    """A stand-in for torch's symbolic-shapes module until its code runs.

    The import takes half a second, most of it in sympy. DTensor imports the names below and calls them for
    sizes that are known. This class handles such calls without loading the module.
    """

    def guard_or_false(self, a: Any) -> Any:
        """Return ``a`` if it is a bool; otherwise load the module and call its function."""
        return a if type(a) is bool else getattr(_load(self), "guard_or_false")(a)  # noqa: B009 - as above

    def guard_or_true(self, a: Any) -> Any:
        """Return ``a`` if it is a bool; otherwise load the module and call its function."""
        return a if type(a) is bool else getattr(_load(self), "guard_or_true")(a)  # noqa: B009 - as above

    def statically_known_true(self, x: Any) -> Any:
        """Return ``x`` if it is a bool; otherwise load the module and call its function."""
        return x if type(x) is bool else getattr(_load(self), "statically_known_true")(x)  # noqa: B009 - as above

    class GuardOnDataDependentSymNode(RuntimeError):  # noqa: N818 - torch's name
        """Replaces torch's error class in ``except`` clauses until the module is loaded."""


_noted: list[tuple[str, Any]] = []
_loading = threading.RLock()


def _load(module: types.ModuleType) -> types.ModuleType:
    """Run the module's own code once, in the same module object."""
    # The lock is reentrant, because the code imports submodules, which access the half-loaded module.
    with _loading:
        if not isinstance(module, _Delayed):
            return module
        spec: Any = module.__spec__
        kind = type(module)
        module.__class__ = types.ModuleType  # type: ignore[assignment]
        try:
            spec.loader.exec_module(module)
        except BaseException:
            # A half-loaded module would fail later with a misleading error, so the next use loads it again.
            module.__class__ = kind
            raise
        if kind is _DelayedCompiler:
            while _noted:
                name, function = _noted.pop()
                getattr(module, name)(function)
        if kind is _DelayedSizes:
            # Other modules may have imported names of the stand-in. Replace these names with the real ones.
            for name, stand_in in vars(_DelayedSizes).items():
                if name.startswith("__"):
                    continue
                for taker in list(sys.modules.values()):
                    taken = getattr(taker, "__dict__", {}).get(name)
                    if getattr(taken, "__func__", taken) is stand_in:
                        setattr(taker, name, getattr(module, name))
    return module


def group_state() -> tuple[int, Any]:
    """Return the number of counted groups and the default group. Tests check both after a failed set-up."""
    return distributed_c10d._world.group_count, distributed_c10d._world.default_pg

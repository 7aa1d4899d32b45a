"""Every private name of torch that Evergrad uses, each with the reason; a test per supported torch holds
them."""

import functools
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch

_COMPILER = "torch._dynamo"

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of a class that sees each operation before it runs. torch documents it and has no public name
for it."""


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
    """Free the threads of this process that wait in NCCL; gloo has no such call.

    Not verified: needs an accelerator.
    """
    distributed_c10d._abort_process_group()


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


def forget_passes(module: Any) -> None:
    """Drop what FSDP2 remembers of passes that no backward pass has followed: a list that would grow.

    Nothing is done for the parts of a module, nor for one that was not called yet, of which torch's public
    name for it knows nothing.
    """
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


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
    import: seconds."""
    import torch._dynamo

    # Any attribute makes a delayed one load.
    _ = torch._dynamo.config


def delay_compiler() -> None:
    """Let torch's compiler be imported by its first real use, not by everything that may use it.

    transformers and torch's own optimizers import it in every process, for decorators that mean something to
    compiled code alone: a third of a second to a second of each start. Nothing changes where it has been
    imported already. Not for a process that forks others: each of them would import it anew.
    """
    if _COMPILER in sys.modules:
        return
    spec = importlib.util.find_spec(_COMPILER)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _DelayedCompiler
    sys.modules[_COMPILER] = module
    torch._dynamo = module
    # transformers' attention masks take a class from this part, which needs no other.
    importlib.import_module(f"{_COMPILER}._trace_wrapped_higher_order_op")
    # Any further part is a use of the compiler: they import each other through the whole.
    del module.__path__


class _DelayedCompiler(types.ModuleType):
    """torch's compiler before its code has run.

    It answers what is asked of it at imports and in eager steps, with torch's names of parameters. Any other
    name loads it, into this same module, and what was asked before takes effect.
    """

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
            return getattr(_load_compiler(self), "disable")(fn, recursive, **options)  # noqa: B009 - a class of this module has the name, too
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Its first real use makes another class of this module, as nothing here shows.
            loaded: Any = self
            if isinstance(loaded, _DelayedCompiler):
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(loaded.disable(fn, recursive, **options))
            return disabled[0](*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        # Others look for such names in every module (inspect, warnings): no use of the compiler.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_load_compiler(self), name)


_noted: list[tuple[str, Any]] = []
_loading = threading.RLock()


def _load_compiler(module: types.ModuleType) -> types.ModuleType:
    """Run the compiler's own code in ``module``, once."""
    # Reentrant: its code imports parts of itself, which ask the module for what it has by then.
    with _loading:
        if isinstance(module, _DelayedCompiler):
            spec: Any = module.__spec__
            module.__class__ = types.ModuleType  # type: ignore[assignment]
            module.__path__ = spec.submodule_search_locations
            try:
                spec.loader.exec_module(module)
            except BaseException:
                # Half a compiler would fail elsewhere, with an error that says nothing: the next use tries
                # again.
                module.__class__ = _DelayedCompiler
                del module.__path__
                raise
            while _noted:
                name, function = _noted.pop()
                getattr(module, name)(function)
    return module


def group_state() -> tuple[int, Any]:
    """(number of groups counted, the default group): what a test of a failed set-up looks at."""
    return distributed_c10d._world.group_count, distributed_c10d._world.default_pg

"""The private names of torch that are used still are what they were: one failing test names what another
torch has changed."""

import inspect
import re
import subprocess
import sys
import types
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from torch.distributed import FileStore, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from evergrad_trainer.base import torch_private


@pytest.fixture
def group(tmp_path: Path) -> "dist.ProcessGroup":
    dist.init_process_group(
        "gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_group_counter_increases_and_is_part_of_the_names(
    group: dist.ProcessGroup,
) -> None:
    counted, default = torch_private.group_state()
    assert counted >= 1 and default is group
    torch_private.reset_group_counter()
    assert torch_private.group_state()[0] == 0
    dist.destroy_process_group()
    assert torch_private.group_state() == (0, None)


def test_a_failed_setup_leaves_the_counter_raised_and_no_group_to_destroy(
    tmp_path: Path,
) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError):
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.2)
        )
    assert not dist.is_initialized()
    assert torch_private.group_state()[0] == 1, (
        "reset_group_counter is not needed with this torch"
    )
    torch_private.reset_group_counter()
    assert torch_private.group_state()[0] == 0


def cut(group: dist.ProcessGroup) -> Any:
    module = torch.nn.Linear(2, 2)
    return fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))


def test_replaced_weights_of_a_sharded_module_are_detected(
    group: dist.ProcessGroup,
) -> None:
    module = cut(group)
    for _ in range(2):
        # Before the first call, and while they are whole.
        assert not torch_private.has_foreign_weights(module)
        module(torch.ones(1, 2))
    module._parameters["weight"] = torch.nn.Parameter(torch.ones(2, 2))
    assert torch_private.has_foreign_weights(module)


def test_forward_passes_without_a_backward_pass_are_forgotten(
    group: dist.ProcessGroup,
) -> None:
    module = cut(group)
    torch_private.forget_passes(module)
    with torch.no_grad():
        module(torch.ones(1, 2))
        module(torch.ones(1, 2))
    remembered = module._get_fsdp_state()._comm_ctx.post_forward_order
    assert len(remembered) == 2, "forget_passes is not needed with this torch"
    torch_private.forget_passes(module)
    assert remembered == []


def test_selected_weights_are_gathered_in_another_dtype_and_their_gradients_summed_in_fp32(
    group: dist.ProcessGroup,
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2))
    first, norm = module
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    torch_private.gather_as(module, {(first, "weight")}, torch.bfloat16)
    seen: list[torch.dtype] = []
    norm.register_forward_pre_hook(
        lambda *_: seen.extend((first.weight.dtype, norm.weight.dtype))
    )
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            module(torch.ones(1, 2)).sum().backward()
    assert seen == 2 * [torch.bfloat16, torch.float32]
    parameters = dict(module.named_parameters())
    assert parameters.keys() == {"0.weight", "1.weight", "1.bias"}
    for parameter in parameters.values():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


def test_all_weights_of_a_module_can_be_gathered_in_another_dtype(
    group: dist.ProcessGroup,
) -> None:
    module = cut(group)
    torch_private.gather_as(module, {(module, "weight"), (module, "bias")}, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32


def test_hooks_on_the_gradient_of_a_parameter_are_detected() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.has_gradient_hooks(parameter)
    parameter.sum().backward()
    assert not torch_private.has_gradient_hooks(parameter)
    handle = parameter.register_hook(lambda gradient: gradient)
    assert torch_private.has_gradient_hooks(parameter)
    handle.remove()
    assert not torch_private.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.has_gradient_hooks(parameter)


_KEPT_GROUP = """
import gc, weakref
import torch.distributed as dist
from evergrad_trainer.base import torch_private
torch_private.keep_groups()
torch_private.keep_groups()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
assert not dist.is_initialized()
assert group() is not None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
"""


def test_a_destroyed_group_is_kept_and_another_can_be_created() -> None:
    subprocess.run([sys.executable, "-c", _KEPT_GROUP], check=True)


def test_a_group_accepts_another_timeout_after_its_setup(group: dist.ProcessGroup) -> None:
    torch_private.set_timeout(group, timedelta(seconds=123))
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=123)


def test_groups_can_be_aborted_by_a_call_without_arguments() -> None:
    parameters = inspect.signature(
        distributed_c10d._abort_process_group
    ).parameters.values()
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters)


def test_tensors_of_different_shapes_are_scaled_in_place_with_the_same_bits_as_one_by_one() -> (
    None
):
    tensors = [torch.randn(3, 5), torch.randn(7), torch.randn(())]
    expected = [tensor * 0.3 for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    torch_private.scale(tensors, 0.3)
    assert all(
        torch.equal(one, other) for one, other in zip(tensors, expected, strict=True)
    )
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    package = Path(torch_private.__file__).parent
    private = re.compile(r"(?:\btorch(?:\.\w+)*|\bdist|\bdistributed_c10d)\._(?!_)\w+")
    found = {
        f"{path.relative_to(package)}: {match[0]}"
        for path in package.rglob("*.py")
        if path.name != "torch_private.py"
        for match in private.finditer(path.read_text("utf-8"))
    }
    assert not found


_EAGER_STEP = """
import sys
import torch
from evergrad_trainer.base import torch_private
torch_private.delay_compiler()
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ids = torch.arange(8)[None]
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo.symbolic_convert" not in sys.modules
assert "sympy" not in sys.modules
"""


def _run_python(code: str) -> None:
    """In a process of its own: what it imports would stay in this one."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_an_eager_step_of_a_transformers_model_does_not_import_the_compiler() -> None:
    _run_python(_EAGER_STEP)


def test_a_delayed_compiler_compiles_and_respects_earlier_decorators() -> None:
    _run_python(
        """
import sys
import torch
from evergrad_trainer.base import torch_private
torch_private.delay_compiler()
import torch._dynamo
seen = []

@torch._dynamo.disable
def note(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1

@torch._dynamo.allow_in_graph
def whole(x):
    return x * 2

graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

assert note(torch.ones(1)).item() == 2.0
assert "torch._dynamo.symbolic_convert" not in sys.modules
compiled = torch.compile(lambda x: note(whole(x)), backend=backend)
assert compiled(torch.ones(1)).item() == 3.0
assert seen == [False, False], seen
assert len(graphs) == 1 and any(node.target is whole for node in graphs[0].graph.nodes), graphs
"""
    )


@pytest.mark.parametrize(
    "first",
    [
        "import torch._dynamo.config",
        "from torch._dynamo.exc import Unsupported",
        "from torch._dynamo.backends.registry import list_backends",
        "from torch._subclasses.fake_tensor import FakeTensorMode; FakeTensorMode()",
    ],
)
def test_a_module_of_a_delayed_compiler_is_the_one_that_the_compiler_uses(
    first: str,
) -> None:
    _run_python(
        f"""
import importlib
import sys
import torch
from evergrad_trainer.base import torch_private
torch_private.delay_compiler()
{first}
import torch._dynamo.config, torch._dynamo.exc, torch._dynamo.backends.registry
from torch._dynamo import convert_frame, symbolic_convert
assert convert_frame.config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert symbolic_convert.exc is torch._dynamo.exc is sys.modules["torch._dynamo.exc"]
assert torch._dynamo.backends.registry is sys.modules["torch._dynamo.backends.registry"]
assert torch._dynamo.config.__spec__.origin.endswith("config.py"), torch._dynamo.config.__spec__
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(1)).item() == 2.0
try:
    import torch._dynamo.nothing
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("a part that is not there was found")
"""
    )


@pytest.mark.long
def test_a_group_is_set_up_and_a_model_is_counted_without_the_compiler() -> None:
    _run_python(
        """
import sys
from pathlib import Path
import torch
from evergrad_trainer.base import torch_private
torch_private.delay_compiler()
import evergrad_trainer.worker.run
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.preflight.memory import model_facts
from evergrad_manifest.training import Model
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.all_reduce(torch.ones(1))
torch.distributed.destroy_process_group()
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
plan = plan_model(Model(config={"model_type": "llama", **sizes}), base_directory=Path(), vocab_size=32)
assert model_facts(plan).parameters == 2 * 32 * 16 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16
torch_private.import_slow_parts()
loaded = {"torch._dynamo.symbolic_convert", "sympy"} & set(sys.modules)
assert not loaded, loaded
"""
    )


def test_the_delayed_symbolic_sizes_answer_known_facts_and_raise_torch_errors() -> None:
    _run_python(
        """
import sys
import torch
from evergrad_trainer.base import torch_private
torch_private.delay_compiler()
from torch.distributed.tensor import _collective_utils, _decompositions
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true, statically_known_true
asked = (guard_or_false, guard_or_true, statically_known_true)
assert all(ask(True) is True and ask(False) is False for ask in asked)
assert "sympy" not in sys.modules
environment = symbolic_shapes.ShapeEnv()
assert "sympy" in sys.modules
size = environment.create_unbacked_symint()
assert [ask(size == 3) for ask in asked] == [False, True, False]
name = "GuardOnDataDependentSymNode"
assert getattr(_decompositions, name) is getattr(symbolic_shapes, name)
assert issubclass(getattr(symbolic_shapes, name), RuntimeError)
assert _collective_utils.guard_or_false is symbolic_shapes.guard_or_false
try:
    bool(size == 3)
except _decompositions.GuardOnDataDependentSymNode:
    pass
else:
    raise AssertionError("an unknown size was known")
"""
    )


def test_record_memory_history_accepts_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Up to the C++ side, which needs an accelerator."""
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        torch._C,
        "_cuda_record_memory_history",
        lambda *args: told.append(args),
        raising=False,
    )
    torch_private.record_memory(5)
    torch_private.record_memory(None)
    assert told[0][0] == "all" and told[0][3] == 5 and told[1][0] is None
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": []})
    torch_private.dump_memory(str(tmp_path / "memory.pickle"))
    assert (tmp_path / "memory.pickle").stat().st_size > 0


def test_the_delayed_compiler_accepts_the_parameter_names_of_torch() -> None:
    import torch._dynamo as loaded

    delayed = torch_private._DelayedCompiler
    assert callable(loaded.trace_rules.clear_lru_cache)
    for name in ("disable", "allow_in_graph", "assume_constant_result", "graph_break"):
        expected = list(inspect.signature(getattr(loaded, name)).parameters)
        found = list(inspect.signature(getattr(delayed, name)).parameters)[1:]
        found = [one for one in found if one != "options"]
        assert found and found == expected[: len(found)], name


def test_a_compiler_that_could_not_be_loaded_is_loaded_at_its_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[types.ModuleType] = []

    def run(module: Any) -> None:
        attempts.append(module)
        if len(attempts) == 1:
            raise ImportError("the disk was away")
        module.config = "whole"

    module: Any = types.ModuleType("compiler")
    module.__spec__ = SimpleNamespace(
        submodule_search_locations=["here"], loader=SimpleNamespace(exec_module=run)
    )
    module.__class__ = torch_private._DelayedCompiler
    with pytest.raises(ImportError, match="the disk was away"):
        _ = module.config
    assert isinstance(module, torch_private._DelayedCompiler)
    assert module.config == "whole"
    assert not isinstance(module, torch_private._DelayedCompiler)

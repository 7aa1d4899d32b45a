"""Compiled models: gradients arrive block by block, under the backward pass."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from evergrad_trainer.distributed.transports import GlooTransport
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.compilation import compile_blocks
from evergrad_trainer.models.gradients import BucketedSum

LAYERS = 3
# torch itself hides the warning, but its filter is not active if warnings are errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(torch.tanh(self.up(values)))
        return values + changed


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embed(values)
        for layer in self.layers:
            values = layer(values)
        result: torch.Tensor = self.head(values)
        return result


class Diary(TorchDispatchMode):
    """Notes each matrix product, compiled or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.entries.append("product")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def graphs_of_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Traced and split into graphs as usual; only the kernels are those of torch, so that the test needs no
    # C++ compiler.
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, **options: compiled(self, backend="aot_eager", **options),
    )
    yield
    torch._dynamo.reset()


def test_gradient_sums_of_later_blocks_start_before_the_backward_pass_of_earlier_ones() -> (
    None
):
    torch.manual_seed(0)
    model = Stack()
    assert compile_blocks(model)
    diary = Diary()

    class Noting(GlooTransport):
        def start_sum(self, values: torch.Tensor, group: Any) -> Any:
            diary.entries.append("sum")
            return torch.futures.Future()

    group: Any = object()
    world = World(1, 0, 2, torch.device("cpu"), group=group, transport=Noting())
    # One bucket per tensor: only the time of each gradient matters here.
    gradients = BucketedSum(list(model.parameters()), bucket_bytes=1)
    for _ in range(2):  # the first traces
        gradients.begin(world)
        gradients.before_backward(is_last=True)
        loss = model(torch.randn(2, 8)).square().sum()
        diary.entries.clear()
        with diary:
            loss.backward()
    # Each weight takes two products, one for its own gradient and one for the layer below; the first layer
    # has none below.
    block = ["product"] * 4 + ["sum"] * 2
    assert diary.entries == ["product"] * 2 + ["sum"] + block * LAYERS + ["product", "sum"]


def test_equal_blocks_share_one_graph() -> None:
    model = Stack()
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    model(torch.randn(2, 8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_model_without_blocks_is_not_compiled() -> None:
    assert not compile_blocks(nn.Linear(2, 2))

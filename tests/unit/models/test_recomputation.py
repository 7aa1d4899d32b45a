"""Recomputation: memory falls, bits stay, also inside of compiled blocks."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from evergrad_trainer.models.recomputation import recompute

# torch itself hides the warning, by a filter that does not stand where warnings are errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)
WIDTH, TOKENS = 32, 64


class Block(nn.Module):
    """Attention and a feed-forward part with dropout, as a transformer's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(1, TOKENS, 4, WIDTH // 4).transpose(1, 2)
            for part in self.mix(self.norm(values)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + mixed.transpose(1, 2).reshape(1, TOKENS, WIDTH)
        inner = functional.silu(self.up(values)) * torch.sigmoid(self.up(values))
        result: torch.Tensor = values + self.dropout(self.down(inner))
        return result


def build(mode: str, *, dropout: float, is_compiled: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(3)))
    blocks = list(model)
    if mode != "none":
        recompute(blocks, is_selective=mode == "selective")
    if is_compiled:
        for block in blocks:
            block.compile(backend="aot_eager", dynamic=False)
    return model


def train(model: nn.Module) -> dict[str, torch.Tensor]:
    """The loss and all gradients of one pass."""
    torch.manual_seed(1)
    loss = model(torch.randn(1, TOKENS, WIDTH)).square().sum()
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    return {"loss": loss.detach()} | {n: g for n, g in gradients.items() if g is not None}


def kept_bytes(model: nn.Module) -> int:
    """Memory that the forward pass has asked for and not given back, counted by torch's allocator."""
    values = torch.randn(1, TOKENS, WIDTH)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(values).sum()
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


@pytest.fixture(autouse=True)
def no_graph_is_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_have_the_bits_of_those_that_keep_everything(
    mode: str, is_compiled: bool
) -> None:
    # Compiled dropout draws its numbers in another order; eager blocks draw the same ones again.
    dropout = 0.0 if is_compiled else 0.2
    expected = train(build("none", dropout=dropout, is_compiled=False))
    found = train(build(mode, dropout=dropout, is_compiled=is_compiled))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_blocks_that_are_computed_again_are_compiled_and_share_their_graphs(mode: str) -> None:
    torch._dynamo.utils.counters.clear()
    train(build(mode, dropout=0.0, is_compiled=True))
    # One for the first block, whose input has no gradient, and one for the other two.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_selective_recomputation_keeps_less_than_everything_and_more_than_nothing() -> None:
    none, full, selective = (
        kept_bytes(build(mode, dropout=0.0, is_compiled=False))
        for mode in ("none", "full", "selective")
    )
    assert full < 0.5 * selective
    assert selective < 0.8 * none

"""Recomputation: memory falls, bits stay, also inside of compiled blocks."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from evergrad_trainer.models import recomputation
from evergrad_trainer.models.recomputation import offload_inputs, recompute

# torch itself hides the warning, but its filter is not active if warnings are errors.
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
    if mode == "offload":
        offload_inputs(blocks)
    return model


def train(model: nn.Module) -> dict[str, torch.Tensor]:
    """The loss and all gradients of one pass."""
    torch.manual_seed(1)
    loss = model(torch.randn(1, TOKENS, WIDTH)).square().sum()
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    return {"loss": loss.detach()} | {n: g for n, g in gradients.items() if g is not None}


def kept_bytes(model: nn.Module) -> int:
    """Memory that the forward pass has allocated and not freed, according to torch's allocator."""
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
@pytest.mark.parametrize("mode", ["full", "offload", "selective"])
def test_recomputed_blocks_are_bit_equal_to_blocks_that_store_everything(
    mode: str, is_compiled: bool
) -> None:
    # Compiled dropout draws its numbers in another order; eager blocks draw the same ones again.
    dropout = 0.0 if is_compiled else 0.2
    expected = train(build("none", dropout=dropout, is_compiled=False))
    found = train(build(mode, dropout=dropout, is_compiled=is_compiled))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("mode", ["none", "full", "offload", "selective"])
def test_recomputed_blocks_are_compiled_and_share_their_graphs(
    mode: str,
) -> None:
    torch._dynamo.utils.counters.clear()
    train(build(mode, dropout=0.0, is_compiled=True))
    # One for the first block, whose input has no gradient, and one for the other two.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_selective_recomputation_stores_more_than_full_and_less_than_none() -> None:
    none, full, selective = (
        kept_bytes(build(mode, dropout=0.0, is_compiled=False))
        for mode in ("none", "full", "selective")
    )
    assert full < 0.5 * selective
    assert selective < 0.8 * none


def leave_outside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory outside of torch's allocator, like host memory for an accelerator's allocator."""
    content = bytearray(tensor.numpy().tobytes())
    return torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape)


@pytest.mark.capability("A-23")
def test_offloaded_blocks_store_no_input_in_device_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputation, "copy_to_host", leave_outside)
    full, offloaded = (
        kept_bytes(build(mode, dropout=0.0, is_compiled=False))
        for mode in ("full", "offload")
    )
    # The first of three blocks is given data, which have no gradient and are not the model's.
    assert full - offloaded == 2 * 4 * TOKENS * WIDTH


@pytest.mark.capability("A-23")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_backward_pass_uses_the_inputs_offloaded_to_the_host(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    expected = train(build("none", dropout=0.0, is_compiled=False))
    left: list[torch.Tensor] = []

    def leave(tensor: torch.Tensor) -> torch.Tensor:
        left.append(leave_outside(tensor))
        return left[-1]

    monkeypatch.setattr(recomputation, "copy_to_host", leave)
    model = build("offload", dropout=0.0, is_compiled=is_compiled)
    found = train(model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    # Only the inputs: no weight is moved, even if a graph saves it.
    assert [tuple(one.shape) for one in left] == [(1, TOKENS, WIDTH)] * 2

    model.zero_grad()
    monkeypatch.setattr(recomputation, "copy_to_host", torch.zeros_like)
    spoiled = train(model)
    assert torch.equal(spoiled["loss"], expected["loss"])
    assert not torch.equal(spoiled["2.up.weight"], expected["2.up.weight"])


def test_a_non_contiguous_view_stays_on_its_device() -> None:
    whole = torch.arange(6.0).view(2, 3)
    copy = recomputation.copy_to_host(whole)
    assert torch.equal(copy, whole) and copy.data_ptr() != whole.data_ptr()
    gaps = whole[:, :2]
    assert recomputation.copy_to_host(gaps) is gaps

"""The kernels that the file chooses, and what a device cannot do."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from evergrad_manifest.training import Runtime
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models import kernels
from evergrad_trainer.models.kernels import AttentionShape, choose_kernels

CPU = torch.device("cpu")
SHAPE = AttentionShape(
    num_heads=4, num_key_value_heads=2, head_size=16, dtype=torch.float32
)


@pytest.fixture(autouse=True)
def choices_of_torch() -> Iterator[None]:
    yield
    choose_kernels(CPU, Runtime(), shape=None)


def choose(device: torch.device = CPU, **choices: Any) -> str:
    shape = choices.pop("shape", SHAPE)
    found = choose_kernels(device, Runtime.model_validate(choices), shape=shape)
    assert found["device"] == device.type
    return found["attention"]


def test_the_default_attention_of_torch_is_reported() -> None:
    assert choose() == "flash"


@pytest.mark.capability("C-19", "A-40")
def test_attention_uses_the_chosen_kernel_also_in_recomputation() -> None:
    query = torch.randn(1, 4, 8, 16, requires_grad=True)
    seen = []
    for attention in ("flash", "math"):
        assert choose(attention=attention) == attention
        with torch.profiler.profile() as profiler:
            torch.nn.functional.scaled_dot_product_attention(
                query, query, query
            ).sum().backward()
        names = {event.key for event in profiler.key_averages()}
        seen.append(any("flash_attention" in name for name in names))
    assert seen == [True, False]


@pytest.mark.parametrize("attention", ["efficient", "cudnn"])
def test_attention_kernels_that_the_device_lacks_are_refused(attention: str) -> None:
    with pytest.raises(ModelError) as caught:
        choose(attention=attention)
    problem = caught.value.problems[0]
    assert problem.path == "spec.training.runtime.attention"
    assert "4 heads of 16 in float32" in problem.why
    # The trial does not leave a kernel switched off.
    assert choose() == "flash"


@pytest.mark.capability("O-7")
def test_tf32_on_a_cpu_is_refused() -> None:
    with pytest.raises(ModelError, match="only accelerators have TF32"):
        choose(matmulPrecision="high")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.capability("O-7")
@pytest.mark.parametrize(("capability", "is_refused"), [((7, 5), True), ((8, 0), False)])
def test_tf32_needs_an_accelerator_that_supports_it(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    if is_refused:
        with pytest.raises(ModelError, match=r"this device has 7\.5"):
            choose(device, matmulPrecision="high", shape=None)
    else:
        assert choose(device, matmulPrecision="high", shape=None) == "auto"
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    # Convolutions go with the matrix products: torch alone makes them in TF32.
    choose()
    assert not torch.backends.cudnn.allow_tf32


def test_every_attention_setting_has_a_torch_switch() -> None:
    choices = get_args(Runtime.model_fields["attention"].annotation)
    assert {"auto", *kernels.SWITCHES} == set(choices)

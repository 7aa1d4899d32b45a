"""The private names of torch that are used still are what they were: one failing test names what another
torch has changed."""

import inspect
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, distributed_c10d

from evergrad_trainer import torch_private


@pytest.fixture
def group(tmp_path: Path) -> "dist.ProcessGroup":
    dist.init_process_group(
        "gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_group_counter_counts_and_is_part_of_the_names(group: dist.ProcessGroup) -> None:
    counted, default = torch_private.group_state()
    assert counted >= 1 and default is group
    torch_private.reset_group_counter()
    assert torch_private.group_state()[0] == 0
    dist.destroy_process_group()
    assert torch_private.group_state() == (0, None)


def test_a_failed_set_up_leaves_the_counter_raised_and_nothing_to_destroy(
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


def test_a_group_takes_another_timeout_after_its_set_up(group: dist.ProcessGroup) -> None:
    torch_private.set_timeout(group, timedelta(seconds=123))
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=123)


def test_groups_can_be_aborted_by_a_call_without_arguments() -> None:
    parameters = inspect.signature(distributed_c10d._abort_process_group).parameters.values()
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters)


def test_tensors_of_different_shapes_are_scaled_in_place_with_the_same_bits_as_one_by_one() -> (
    None
):
    tensors = [torch.randn(3, 5), torch.randn(7), torch.randn(())]
    expected = [tensor * 0.3 for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    torch_private.scale(tensors, 0.3)
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
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

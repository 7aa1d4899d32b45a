"""Buffers that a forward pass changes are refused if several workers train, and allowed with one worker."""

import pytest
import torch
from torch import nn

from evergrad_trainer.base.errors import TaskError, TaskInputError
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.training.buffers import BufferWatch

FIRST, SECOND = Stage({}), Stage({})
ROWS = torch.arange(12.0).view(4, 3)


class Counting(nn.Module):
    """Counts its calls in a buffer, or in a buffer that is not a part of the state."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return rows


def watch_call(module: nn.Module, **options: bool) -> BufferWatch:
    watch = BufferWatch({"extra": module}, Code(None), **options)
    with watch.watching(FIRST, num_workers=2):
        module(ROWS)
    return watch


def test_statistics_that_a_pass_changes_are_refused_by_name() -> None:
    with pytest.raises(TaskInputError) as raised:
        watch_call(nn.Sequential(nn.BatchNorm1d(3)))
    message = str(raised.value)
    assert (
        "extra.0.running_mean, extra.0.running_var, extra.0.num_batches_tracked" in message
    )
    assert "LayerNorm" in message


def test_a_replaced_buffer_is_detected_and_an_unsaved_buffer_may_change() -> None:
    with pytest.raises(TaskInputError, match=r"extra\.calls"):
        watch_call(Counting(persistent=True))
    watch_call(Counting(persistent=False))


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3).eval()]
)
def test_unchanged_statistics_are_accepted(module: nn.Module) -> None:
    watch_call(module)


def test_an_unchanged_nan_is_not_a_change() -> None:
    module = nn.Identity()
    module.register_buffer("spare", torch.tensor([float("nan"), 1.0]))
    watch_call(module)


def test_each_stage_is_checked_once() -> None:
    module = Counting(persistent=True)
    watch = BufferWatch({"extra": module}, Code(None))
    for stage in (FIRST, SECOND):
        with watch.watching(stage, num_workers=2):
            pass
        # Later micro-batches cost no copies.
        with watch.watching(stage, num_workers=2):
            module(ROWS)
    with (
        pytest.raises(TaskInputError),
        BufferWatch({"extra": module}, Code(None)).watching(SECOND, num_workers=2),
    ):
        module(ROWS)


def test_a_single_worker_may_change_its_buffers_unless_others_can_join() -> None:
    module = Counting(persistent=True)
    alone = BufferWatch({"extra": module}, Code(None))
    with alone.watching(FIRST, num_workers=1):
        module(ROWS)
    # It is checked when it no longer trains alone.
    with pytest.raises(TaskInputError), alone.watching(FIRST, num_workers=2):
        module(ROWS)
    elastic = BufferWatch({"extra": module}, Code(None), may_share=True)
    with pytest.raises(TaskInputError), elastic.watching(FIRST, num_workers=1):
        module(ROWS)


def test_a_run_that_has_trained_does_not_end_with_a_user_error() -> None:
    module = Counting(persistent=True)
    watch = BufferWatch({"extra": module}, Code(None, has_trained=True))
    with pytest.raises(TaskError), watch.watching(FIRST, num_workers=2):
        module(ROWS)


def test_a_pass_outside_training_leaves_buffers_unchanged() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), Counting(persistent=True))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with BufferWatch({"extra": module}, Code(None)).restoring():
        module(ROWS)
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())

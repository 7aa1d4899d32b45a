"""Copies of a sharded model: a world that cannot be cut into them."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from evergrad_manifest.errors import InputError
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.parallel import Sharding, ShardPlan, shard


def test_a_group_size_that_cannot_be_split_into_replicas_does_not_end_the_run() -> None:
    three = World(
        generation=2, rank=0, size=3, device=torch.device("cpu"), group=cast(Any, object())
    )
    with pytest.raises(
        HostError, match="3 workers cannot be cut into copies of 2"
    ) as caught:
        shard([ShardPlan(nn.Linear(2, 2))], three, Sharding("fp32", shards=2))
    assert not isinstance(caught.value, InputError)

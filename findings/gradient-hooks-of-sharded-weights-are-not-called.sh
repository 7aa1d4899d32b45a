#!/bin/sh
# A hook on the gradient of a weight (Tensor.register_hook) is never called once its module is sharded by fully_shard.
#
# torch 2.13.0 (CPU, gloo, a group of one process). The usual way to keep some rows of an embedding still is a hook that
# multiplies their gradient by zero. fully_shard replaces the parameter by a sharded one and computes with a third tensor,
# and a hook that was registered before, or on the sharded parameter afterwards, stays silent: no error and no warning, and
# the rows move. register_post_accumulate_grad_hook on the sharded parameter is called.
#
# Seen: "hook before sharding: called 0 times, after: called 0 times, post-accumulate hook after: called 1 time".
# Usage: gradient-hooks-of-sharded-weights-are-not-called.sh   (exits with 1 if the behaviour has changed)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
calls = {"before": 0, "after": 0, "post": 0}


def count(name):
    def hook(*_):
        calls[name] += 1

    return hook


module = nn.Linear(4, 4)
module.weight.register_hook(count("before"))
fully_shard(module, mesh=mesh)
module.weight.register_hook(count("after"))
module.weight.register_post_accumulate_grad_hook(count("post"))
module(torch.ones(2, 4)).sum().backward()
assert module.weight.grad is not None
print(
    f"hook before sharding: called {calls['before']} times, after: called {calls['after']} times, "
    f"post-accumulate hook after: called {calls['post']} time"
)
dist.destroy_process_group()
sys.exit(0 if calls == {"before": 0, "after": 0, "post": 1} else 1)
PY

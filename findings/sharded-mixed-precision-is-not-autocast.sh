#!/bin/sh
# fully_shard with MixedPrecisionPolicy(param_dtype=bf16) under autocast computes another loss than autocast alone.
#
# torch 2.13.0 (CPU, gloo, a group of one process, so that nothing is divided or added up). Autocast rounds the weights of
# products and leaves norms, embeddings and what flows between layers in fp32. The policy gathers every weight in bf16 and
# casts the inputs of each module that is sharded, also with autocast around the call. cast_forward_inputs=False is not
# enough: the weights of norms and embeddings are rounded all the same. Whoever moves a run from replicated to sharded
# training with "the same precision" trains with other numbers from the first step on.
#
# Seen: "norm weight in the forward pass: torch.float32 with autocast, torch.bfloat16 with the policy" and
#       "losses are equal without a policy: True, with it: False, without casts of inputs: False".
# Usage: sharded-mixed-precision-is-not-autocast.sh       (exits with 1 if the behaviour has changed)
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
ids = torch.arange(64) % 17
seen = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(17, 32), nn.LayerNorm(32), nn.Linear(32, 17)

    def forward(self, ids):
        seen.append(self.norm.weight.dtype)
        return self.head(self.norm(self.table(ids)))


def loss(policy):
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.norm.weight.add_(torch.randn(32) / 10)
    if policy is not None:
        fully_shard(model, mesh=mesh, mp_policy=policy)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(model(ids).float(), (ids + 1) % 17).item()


whole = loss(None)
types = [seen[-1]]
equal = [loss(MixedPrecisionPolicy()) == whole]
narrow = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
equal.append(loss(MixedPrecisionPolicy(**narrow)) == whole)
types.append(seen[-1])
equal.append(loss(MixedPrecisionPolicy(**narrow, cast_forward_inputs=False)) == whole)
print(f"norm weight in the forward pass: {types[0]} with autocast, {types[1]} with the policy")
print(f"losses are equal without a policy: {equal[0]}, with it: {equal[1]}, without casts of inputs: {equal[2]}")
dist.destroy_process_group()
is_as_seen = types == [torch.float32, torch.bfloat16] and equal == [True, False, False]
sys.exit(0 if is_as_seen else 1)
PY

#!/bin/sh
# Under torch.autocast in bf16, the experts of a transformers mixture of experts are still multiplied in fp32.
#
# transformers 5.23.0, torch 2.13.0 (CPU). The experts of a layer are one tensor, and the default implementation
# multiplies them by torch.nn.functional.grouped_mm, which autocast does not know: it leaves the weights as they are, and
# transformers gives the input their type. Attention and the router of the same layer compute in bf16. A training with
# "bf16 autocast" therefore has its largest products in fp32, and a tool that rounds all weights to bf16 while it gathers
# them, such as a sharding policy, computes something else than autocast does.
#
# Seen: "linear: largest difference under autocast 1.7e-03" (any number above 1e-4) and
#       "experts: equal to the bit under autocast".
# Usage: experts-under-autocast-compute-in-fp32.sh        (exits with 1 if the behaviour has changed)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cd "$work"
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
)
model = MixtralForCausalLM(config)
layer = model.model.layers[0]
experts = next(part for part in layer.modules() if type(part).__name__ == "MixtralExperts")
linear = layer.self_attn.q_proj
tokens = torch.randn(16, 32)
chosen = torch.randint(0, 4, (16, 2))
weights = torch.full((16, 2), 0.5)


def call(is_narrow):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        return linear(tokens).float(), experts(tokens, chosen, weights).float()


plain, narrow = call(False), call(True)
difference = (plain[0] - narrow[0]).abs().max().item()
print(f"linear: largest difference under autocast {difference:.1e}")
is_equal = torch.equal(plain[1], narrow[1])
print("experts:", "equal to the bit under autocast" if is_equal else "different under autocast")
sys.exit(0 if difference > 1e-4 and is_equal else 1)
PY

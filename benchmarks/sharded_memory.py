"""Peak memory of a process of an FSDP2 world of four, as a share of the whole fp32 state.

The whole state is weights and two moments in fp32 (12 bytes a parameter); for scale, the same with gradients
(16 bytes), which a process that trains alone holds too. Four processes of one machine build a Llama of 1.3B
parameters (or a smaller one), initialise it, and train some steps of two slots each. What the process held
before it built the model (Python, torch, transformers) is not counted: at these sizes it is not small, and
does not grow. The peak is that of the process, not of its tensors: what the allocator keeps, and buffers of
collectives, count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Row, open_without_data, print_rows

WORLD_SIZE = 4
_STEPS = 2
SHAPES = {
    # hidden, intermediate, layers, heads, vocabulary
    "50M": (512, 1408, 12, 8, 8192),
    "350M": (1024, 2816, 24, 16, 16384),
    "700M": (1536, 4096, 24, 16, 32000),
    "1.3B": (2048, 5632, 24, 16, 32000),
}


def measure(*, parameters: str = "350M") -> list[Row]:
    """The largest peak of the four processes."""
    from elastic_nodes import free_port

    port = str(free_port())
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORLD_SIZE):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD_SIZE),
                "MASTER_ADDR": "127.0.0.1",
            }
            command = [sys.executable, __file__, "--rank", folder, "--parameters", parameters]
            variables = {**os.environ, **place, "MASTER_PORT": port}
            ranks.append(
                subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
            )
        try:
            outputs = [process.communicate(timeout=3000)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    what = (
        f"FSDP2 of {WORLD_SIZE} processes, {parameters} Llama, bf16 products, fp32 state, CPU"
    )
    state = 12 * found[0]["parameters"]
    built, peak = (max(one[key] for one in found) for key in ("built", "peak"))
    return [
        Row(
            what,
            "whole state",
            state / 2**30,
            "GiB",
            note=f"{found[0]['parameters']:,} parameters",
        ),
        Row(what, "peak of building / whole state", built / state, "ratio"),
        Row(what, "peak of a process / whole state", peak / state, "ratio", goal="<= 0.35"),
        Row(
            what,
            "peak / state and gradients",
            0.75 * peak / state,
            "ratio",
            note="for scale: 16 bytes a parameter; sharding alone makes it 0.25",
        ),
    ]


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _be_rank(folder: Path, parameters: str) -> None:
    import torch
    import torch.distributed as dist

    from evergrad_manifest.training import Training
    from evergrad_trainer.models.build import plan_model
    from evergrad_trainer.models.parallel import build_gradient_sum
    from evergrad_trainer.training.build import build_machinery
    from evergrad_trainer.world import World

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    config: dict[str, Any] = dict(zip(names, SHAPES[parameters], strict=True))
    training = Training.model_validate(
        {
            "model": {"config": {"model_type": "llama", **config}},
            "data": {
                "sources": [{"name": "docs", "path": "documents.jsonl"}],
                "sequenceLength": 64,
            },
            "batching": {"globalBatchSize": 2 * WORLD_SIZE, "microBatchSize": 1},
            "optimizer": {"learningRate": 1e-4},
            "horizon": {"steps": 10},
            "runtime": {
                "parallelism": "fsdp2",
                "compile": "off",
                "activationCheckpointing": True,
            },
        }
    )
    plan = plan_model(training.model, base_directory=folder, vocab_size=257)
    _build_once_small(training, folder)
    before = _resident_bytes()
    world = World(1, dist.get_rank(), WORLD_SIZE, torch.device("cpu"), group=dist.group.WORLD)
    opened = open_without_data(training)
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    built = _peak_bytes() - before
    gradients = build_gradient_sum(machinery.model, training, slots_per_step=2, is_sharded=True)
    ids = torch.arange(64).reshape(1, 64)
    for _ in range(_STEPS):
        gradients.begin(world)
        for slot in range(2):
            gradients.before_backward(is_last=slot == 1)
            with machinery.autocast():
                batch = {"input_ids": ids, "labels": ids}
                loss = machinery.loss_of(batch, opened.data.train.stages[0]).total
            (loss / 64).backward()
            gradients.after_backward()
        gradients.finish()
        machinery.optimizer.step()
    total = sum(parameter.numel() for parameter in machinery.model.parameters())
    print(
        json.dumps({"parameters": total, "built": built, "peak": _peak_bytes() - before}),
        flush=True,
    )
    dist.destroy_process_group()


def _build_once_small(training: Any, folder: Path) -> None:
    """Import what a model of this kind, its sharding and its first update import: not counted."""
    from evergrad_trainer import torch_private
    from evergrad_trainer.models.build import build_model, plan_model

    # The compiler's package comes with the first update of an optimizer, and takes 100 MB and more.
    torch_private.import_slow_parts()

    small = {
        **training.model.config,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    model = training.model.model_copy(update={"config": {**small, "vocab_size": 257}})
    build_model(
        plan_model(model, base_directory=folder, vocab_size=257), seed=0, precision="fp32"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", choices=SHAPES, default="350M")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _be_rank(options.rank, options.parameters)
    else:
        print_rows(measure(parameters=options.parameters))

"""Peak memory of a process in an FSDP2 world of four, as a share of the whole fp32 state.

The whole state is weights and two moments in fp32: 12 bytes per parameter. One of four processes holds a
quarter of it, 0.25, and a quarter of the gradients, 4 bytes per parameter: 0.333 in total. The rest up to the
goal is for gathered layers, activations and the allocator. For comparison, the same peak is shown relative to
16 bytes per parameter, which a single training process holds.

Four processes of one machine build a Llama of 1.3B parameters (or a smaller one), initialise it, and train
some steps of two slots each. The result is the kernel's peak of the whole process (``VmHWM``) minus its
memory before it built the model (Python, torch, transformers: significant at these sizes, but constant).
Memory that the allocator keeps, and buffers of collectives, count. glibc is configured to keep no free pieces
of 1 MiB or more (``--keeping``: up to 32 MiB per piece, the default for users), because allocators of
accelerators do not have such holes. File pages count in each process that maps them, as if it were alone:
pages that were mapped before the model are subtracted, and the others have a separate row.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Row, open_without_data, print_rows

if TYPE_CHECKING:
    from evergrad_manifest.training import Training
    from evergrad_trainer.distributed.world import World
    from evergrad_trainer.training.build import Machinery

WORLD_SIZE = 4
_STEPS, _SLOTS = 2, 2
_LENGTH = 64
_KEEP_NOTHING_LARGE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc: allocate pieces from 1 MiB individually with mmap, and return them when they are freed."""
"""Tokens of a sample: so few that activations are negligible compared with the state."""
SHAPES = {
    # hidden, intermediate, layers, heads, vocabulary
    "50M": (512, 1408, 12, 8, 8192),
    "350M": (1024, 2816, 24, 16, 16384),
    "700M": (1536, 4096, 24, 16, 32000),
    "1.3B": (2048, 5632, 24, 16, 32000),
}


@dataclass(frozen=True)
class Held:
    """Bytes of this process: ``peak`` is the maximum so far, and ``files`` the current file pages."""

    now: int
    peak: int
    files: int


def held() -> Held:
    """Read the values from the kernel."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    words = dict(line.split(":", 1) for line in lines)
    now, peak, files = (
        int(words[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile")
    )
    return Held(now, peak, files)


def measure(*, parameters: str = "350M", is_keeping: bool = False) -> list[Row]:
    """Return the largest peak of the four processes."""
    found = _run_ranks(parameters, {} if is_keeping else _KEEP_NOTHING_LARGE)
    what = (
        f"FSDP2 of {WORLD_SIZE} processes, {parameters} Llama, bf16 products, fp32 state, CPU"
        f"{', holes kept' if is_keeping else ''}"
    )
    num_parameters = found[0]["parameters"]
    state = 12 * num_parameters
    built, peak, files = (
        max(one[key] for one in found) for key in ("built", "peak", "files")
    )
    return [
        Row(
            what,
            "whole state",
            state / 2**30,
            "GiB",
            note=f"{num_parameters:,} parameters",
        ),
        Row(what, "peak of building / whole state", built / state, "ratio"),
        Row(
            what,
            "peak of a process / whole state",
            peak / state,
            "ratio",
            goal="<= 0.35",
        ),
        Row(
            what,
            "of it pages of files",
            files / state,
            "ratio",
            note="mapped since the model was begun; processes of one machine share them",
        ),
        Row(
            what,
            "peak / state and gradients",
            0.75 * peak / state,
            "ratio",
            note="for scale: 16 bytes a parameter; sharding alone makes it 0.25",
        ),
    ]


def _run_ranks(parameters: str, allocator: dict[str, str]) -> list[dict[str, int]]:
    """Start the four processes, and return the values of each."""
    from elastic_nodes import free_port

    place = {
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank", folder, "--parameters", parameters]
        try:
            for rank in range(WORLD_SIZE):
                variables = {**os.environ, **allocator, **place, "RANK": str(rank)}
                process = subprocess.Popen(
                    command, env=variables, stdout=subprocess.PIPE, text=True
                )
                ranks.append(process)
            outputs = [process.communicate(timeout=3000)[0] for process in ranks]
        finally:
            # A failed process leaves the others waiting for it, so kill them.
            for process in ranks:
                process.kill()
                process.wait()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _training(parameters: str) -> "Training":
    from evergrad_manifest.training import Training

    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    config: dict[str, Any] = dict(zip(names, SHAPES[parameters], strict=True))
    return Training.model_validate(
        {
            "model": {"config": {"model_type": "llama", **config}},
            "data": {
                "sources": [{"name": "docs", "path": "documents.jsonl"}],
                "sequenceLength": _LENGTH,
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


def _be_rank(folder: Path, parameters: str) -> None:
    import torch
    import torch.distributed as dist

    from evergrad_trainer.distributed.world import World
    from evergrad_trainer.models.build import plan_model
    from evergrad_trainer.training.build import build_machinery

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = _training(parameters)
    plan = plan_model(training.model, base_directory=folder, vocab_size=257)
    _build_once_small(training, folder)

    # Memory from here on belongs to the model.
    before = held()
    world = World(
        1,
        dist.get_rank(),
        WORLD_SIZE,
        torch.device("cpu"),
        group=dist.group.WORLD,
    )
    opened = open_without_data(training)
    machinery = build_machinery(
        training,
        opened,
        plan,
        world,
        with_weights=True,
    )
    built = held().peak - before.now

    _train(training, machinery, world)
    after = held()
    figures = {
        "parameters": sum(parameter.numel() for parameter in machinery.model.parameters()),
        "built": built,
        "peak": after.peak - before.now,
        "files": after.files - before.files,
    }
    print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


def _train(training: "Training", machinery: "Machinery", world: "World") -> None:
    """Train some steps of two slots each, without reading data: forward, backward, sums, update."""
    import torch

    from evergrad_trainer.models.parallel import build_gradient_sum

    gradients = build_gradient_sum(
        machinery.model, training, slots_per_step=_SLOTS, is_sharded=True
    )
    ids = torch.arange(_LENGTH).reshape(1, _LENGTH)
    stage = machinery.opened.data.train.stages[0]
    for _ in range(_STEPS):
        gradients.begin(world)
        for slot in range(_SLOTS):
            gradients.before_backward(is_last=slot == _SLOTS - 1)
            with machinery.autocast():
                loss = machinery.loss_of({"input_ids": ids, "labels": ids}, stage).total
            (loss / _LENGTH).backward()
            gradients.after_backward()
        gradients.finish()
        machinery.optimizer.step()


def _build_once_small(training: Any, folder: Path) -> None:
    """Trigger the imports of a model of this kind, its sharding and its first update, which do not count."""
    from evergrad_trainer.base import torch_private
    from evergrad_trainer.models.build import build_model, plan_model

    # An optimizer's first update imports the compiler's package, which takes 100 MB and more.
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
    parser.add_argument("--keeping", action="store_true", help="glibc keeps what it likes")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _be_rank(options.rank, options.parameters)
    else:
        print_rows(measure(parameters=options.parameters, is_keeping=options.keeping))

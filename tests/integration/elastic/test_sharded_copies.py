"""Copies of a sharded model side by side (HSDP): four processes as two copies of two shards."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_processes as processes
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.training import Checkpoint, Training
from evergrad_trainer.base.errors import DivergedError, HostError
from evergrad_trainer.checkpoint.attempts import Medium
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.token_source import INPUT_IDS, LABELS
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.models import recomputation
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.models.parallel import build_gradient_sum
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.training.build import Machinery, build_comparison, build_machinery

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
STAGE = Stage({})
IDENTITY = Identity("run", "recipe", "data")
STEPS = 3


def ids_of(rank: int) -> torch.Tensor:
    return (torch.arange(24).reshape(2, 12) * (rank + 3)) % 257


def make_training(**runtime: Any) -> Training:
    return Training.model_validate(
        {
            "model": {"config": CONFIG},
            "data": {
                "sources": [{"name": "docs", "path": "documents.jsonl"}],
                "sequenceLength": 12,
            },
            "batching": {"globalBatchSize": 8, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": STEPS},
            "runtime": {
                "precision": "fp32",
                "parallelism": "fsdp2",
                "compile": "off",
                "device": "cpu",
                **runtime,
            },
        }
    )


def build(world: World, directory: Path, runtime: dict[str, Any]) -> Machinery:
    training = make_training(**runtime)
    plan = plan_model(training.model, base_directory=directory, vocab_size=257)
    task, code = load_task(training, directory)
    # No data, because the result of the build does not depend on them.
    data: Any = SimpleNamespace(train=SimpleNamespace(stages=(STAGE,)))
    return build_machinery(
        training, Opened(task, code, data, {}), plan, world, with_weights=True
    )


def train(
    machinery: Machinery, world: World, *, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Make ``steps`` updates, each over one micro-batch a rank; the gradients of each, whole."""
    gradients = build_gradient_sum(
        machinery.model, make_training(), slots_per_step=4, is_sharded=machinery.is_sharded
    )
    seen = []
    for _ in range(steps):
        gradients.begin(world)
        gradients.before_backward(is_last=True)
        ids = ids_of(world.rank)
        (machinery.loss_of({INPUT_IDS: ids, LABELS: ids}, STAGE).total / 96).backward()
        gradients.after_backward()
        gradients.finish()
        seen.append(
            {name: whole(value.grad) for name, value in machinery.model.named_parameters()}
        )
        assert machinery.optimizer is not None
        machinery.optimizer.step()
    return seen


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def whole_state(machinery: Machinery) -> dict[str, torch.Tensor]:
    return {name: whole(value.detach()) for name, value in machinery.state().items()}


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def held_bytes(machinery: Machinery) -> int:
    return sum(
        value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes
        for value in machinery.state().values()
    )


def compare_layouts(world: World, directory: Path) -> dict[str, Any]:
    """Train the same steps with one copy over all ranks and with two copies of two."""
    one = build(world, directory, {})
    two = build(world, directory, {"shards": 2})
    first, second = train(one, world), train(two, world)
    # Each parameter of a rank, as its neighbour in the other copy holds it.
    local = torch.cat([p.to_local().flatten() for p in two.model.parameters()])  # type: ignore[attr-defined]
    rows = world.gather_json(local.double().sum().item())
    refusal = ""
    try:
        build(world, directory, {"shards": 3})
    except HostError as error:
        refusal = str(error)
    names = sorted(name for name, _ in two.model.named_parameters())
    return {
        "dimensions": sorted({p.device_mesh.ndim for p in two.model.parameters()}),  # type: ignore[attr-defined]
        "gradients": largest_difference(second[0], first[0]),
        "state": largest_difference(whole_state(two), whole_state(one)),
        "bytes": [held_bytes(one), held_bytes(two)],
        "sums": rows,
        "names": names,
        "refusal": refusal,
    }


@pytest.mark.capability("O-23")
def test_two_replicas_of_two_shards_train_like_four_shards_and_use_twice_the_memory(
    tmp_path: Path,
) -> None:
    ranks = processes.values(
        processes.run_world(compare_layouts, size=4, directory=tmp_path / "run")
    )
    for found in ranks:
        assert found["dimensions"] == [2]
        # The additions have another order, and nothing else differs.
        assert found["gradients"] < 1e-6
        assert found["state"] < 1e-4
        # Both copies hold the same bits.
        assert found["sums"][:2] == found["sums"][2:]
        assert "4 workers cannot be cut into copies of 3" in found["refusal"]
    one, two = (sum(found["bytes"][index] for found in ranks) for index in (0, 1))
    assert 1.9 < two / one < 2.1


def compare_after_a_flip(world: World, directory: Path) -> dict[str, Any]:
    """Return the results of ranks of three copies before and after a bit of rank 3 has flipped."""
    machinery = build(world, directory, {"shards": 2})
    train(machinery, world, steps=1)
    compare = build_comparison(machinery, Membership(world))
    compare(1)
    if world.rank == 3:
        weight: Any = next(machinery.model.parameters())
        weight.detach().to_local().view(-1).view(torch.int32)[0] ^= 1 << 21
    try:
        compare(1)
    except DivergedError as error:
        return {"message": str(error), "ranks": error.ranks}
    return {"message": "", "ranks": ()}


def test_a_flipped_bit_in_one_of_three_replicas_is_detected_and_its_rank_named(
    tmp_path: Path,
) -> None:
    ranks = processes.values(
        processes.run_world(compare_after_a_flip, size=6, directory=tmp_path / "run")
    )
    for found in ranks:
        assert list(found["ranks"]) == [3]
        assert "the state after step 1 differs between ranks" in found["message"]
        assert "by majority that of rank 3 is wrong" in found["message"]


def save_and_hash(
    world: World, directory: Path, *, runtime: dict[str, Any], is_new: bool
) -> dict[str, Any]:
    """Train and save, or restore; the whole state as numbers."""
    machinery = build(world, directory.parent, runtime)
    manager = CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint.model_validate({"asynchronous": False}),
        identity=IDENTITY,
        on_event=lambda type_, fields: None,
        store=open_store(directory, medium=Medium(stale_seconds=0.2)),
    )
    if is_new:
        train(machinery, world)
        manager.save(STEPS, machinery.state(), extra={"step": STEPS}, wait=True)
    else:
        restored = manager.restore(machinery.state())
        assert restored is not None and restored.step == STEPS
    manager.close()
    sums = {
        name: value.double().sum().item() for name, value in whole_state(machinery).items()
    }
    return {"sums": sums}


@pytest.mark.long
def test_a_checkpoint_of_two_replicas_is_restored_by_other_numbers_of_processes(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    saved = processes.values(
        processes.run_world(
            save_and_hash, size=4, directory=directory, runtime={"shards": 2}, is_new=True
        )
    )
    worlds = (
        (2, {"shards": 2}),
        (4, {}),
        (2, {"parallelism": "dataParallel"}),
        (4, {"shards": 2}),
    )
    for size, runtime in worlds:
        restored = processes.values(
            processes.run_world(
                save_and_hash, size=size, directory=directory, runtime=runtime, is_new=False
            )
        )
        assert all(one == saved[0] for one in restored)


def test_the_gradients_of_replicas_equal_those_of_a_whole_model(tmp_path: Path) -> None:
    ranks = processes.values(
        processes.run_world(compare_with_a_whole_model, size=4, directory=tmp_path / "run")
    )
    assert all(found < 1e-6 for found in ranks)


def compare_with_a_whole_model(world: World, directory: Path) -> float:
    machinery = build(world, directory, {"shards": 2})
    found = train(machinery, world, steps=1)[0]
    training = make_training()
    plan = plan_model(training.model, base_directory=directory, vocab_size=257)
    model = build_model(plan, seed=0, precision="fp32")
    loss = causal_lm_loss(model)
    for rank in range(world.size):
        (loss(ids_of(rank), ids_of(rank)) / 96).backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    return largest_difference(found, expected)


COMBINED = (
    {"lossChunk": 5},
    {"lossChunk": 5, "compile": "on"},
    {"activationCheckpointing": "selective"},
    {"activationCheckpointing": "full", "compile": "on"},
    {"activationCheckpointing": "offload"},
    {"activationCheckpointing": "offload", "compile": "on"},
    {"lossChunk": 5, "compile": "on", "activationCheckpointing": "selective"},
)


def combine(world: World, directory: Path) -> dict[str, tuple[float, int]]:
    """Return the distance of each combination's gradients from those of plain sharding, and the number of
    block inputs that were moved to the host."""
    compiled, copy, left = nn.Module.compile, recomputation.copy_to_host, Counter[str]()

    def compile_plainly(self: nn.Module, **options: Any) -> None:
        # Traced and split into graphs as usual; only the kernels are those of torch, so that no compiler is
        # needed.
        compiled(self, backend="aot_eager", **options)

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        left[name] += 1
        return copy(tensor)

    nn.Module.compile = compile_plainly  # type: ignore[method-assign]
    recomputation.copy_to_host = counting
    expected = train(build(world, directory, {}), world, steps=1)[0]
    differences = {}
    for runtime in COMBINED:
        name = str(runtime)
        gradients = train(build(world, directory, runtime), world, steps=1)[0]
        differences[name] = largest_difference(gradients, expected)
    return {name: (value, left[name]) for name, value in differences.items()}


@pytest.mark.capability("A-23")
def test_chunked_losses_compiled_blocks_and_recomputation_can_be_combined_with_shards(
    tmp_path: Path,
) -> None:
    ranks = processes.values(
        processes.run_world(combine, size=2, directory=tmp_path / "run")
    )
    for found in ranks:
        assert len(found) == len(COMBINED)
        assert {name: value for name, (value, _) in found.items() if value > 1e-6} == {}
        # One input of each of the two blocks.
        assert {name: left for name, (_, left) in found.items()} == {
            str(runtime): 2 * (runtime.get("activationCheckpointing") == "offload")
            for runtime in COMBINED
        }

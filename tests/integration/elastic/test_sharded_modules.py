"""Several trained modules, frozen ones and kept tensors under fsdp2: trained, saved, resumed and compared as the
same task is where each process holds all of it."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import checkpoint_processes as processes
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from evergrad_manifest.training import Checkpoint, Training
from evergrad_trainer.base.errors import DivergedError, HostError, TaskError, TaskInputError
from evergrad_trainer.checkpoint.attempts import Medium
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.models import parallel
from evergrad_trainer.models.build import ModelPlan, plan_model
from evergrad_trainer.models.parallel import build_gradient_sum, reshard
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Loss, Modules, Section, Tensors, full_tensor
from evergrad_trainer.training.build import Machinery, build_comparison, build_machinery
from evergrad_trainer.training.step_parts import StepOutcome
from evergrad_trainer.training.task_adapter import build_finish
from evergrad_trainer.worker.peer_failures import is_peer_error

WIDTH = 10
STAGE = Stage({})
IDENTITY = Identity("run", "recipe", "data")
SLOTS, STEPS = 4, 3
REPLICATED, SHARDED = {"parallelism": "dataParallel"}, {"parallelism": "fsdp2"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class Tower(nn.Module):
    """Repeated blocks, and weights that no block holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * self.scale


class Distilled:
    """Two trained modules, two sharded frozen modules, a whole frozen module, and kept tensors of two
    types."""

    Options = Section
    metrics: Mapping[str, str] = {}

    def build(self, build_model: Any) -> Modules:
        encoder, teacher, target = Tower(WIDTH), Tower(WIDTH), Tower(WIDTH)
        predictor, projector = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        kept = {
            f"average/{name}": torch.empty_like(weight)
            for name, weight in encoder.named_parameters()
        }
        return Modules(
            {"encoder": encoder, "predictor": predictor},
            {"teacher": teacher, "projector": projector, "target": target},
            {"centre": torch.zeros(WIDTH), **kept},
            replicated=["target"],
        )

    def enter(self, modules: Modules, stage: Stage) -> None:
        for name, weight in modules.trained["encoder"].named_parameters():
            modules.kept[f"average/{name}"].copy_(full_tensor(weight))

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        for name, weight in modules.trained["encoder"].named_parameters():
            modules.kept[f"average/{name}"].lerp_(full_tensor(weight), 0.25)
        predictor: Any = modules.trained["predictor"]
        modules.kept["centre"].lerp_(full_tensor(predictor.bias), 0.5)

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        x, other = batch["x"], batch["other"]
        encoder, predictor = modules.trained["encoder"], modules.trained["predictor"]
        with torch.no_grad():
            average = {
                name.removeprefix("average/"): kept
                for name, kept in modules.kept.items()
                if name != "centre"
            }
            wanted = modules.frozen["teacher"](x)
            wanted = wanted + functional_call(modules.frozen["target"], average, (x,))
        # Called twice, once more without gradients, and through a frozen module.
        first, second = encoder(x), encoder(other)
        with torch.no_grad():
            third = encoder(x + other)
        guess = predictor(modules.frozen["projector"](first)) - modules.kept["centre"]
        return Loss((guess - wanted).square().sum() + (second - third).square().sum())


def make_training(**runtime: Any) -> Training:
    return Training.model_validate(
        {
            "model": {"config": LLAMA},
            "data": {"sources": [{"name": "d", "path": "d.jsonl"}], "sequenceLength": 12},
            "batching": {"globalBatchSize": 8, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-2},
            "horizon": {"steps": STEPS},
            "runtime": {"precision": "fp32", "compile": "off", "device": "cpu", **runtime},
        }
    )


def build(
    world: World,
    runtime: dict[str, Any],
    *,
    task: Any = None,
    plan: ModelPlan | None = None,
    with_weights: bool = True,
) -> Machinery:
    data: Any = SimpleNamespace(train=SimpleNamespace(stages=(STAGE,)))
    opened = Opened(task or cast(Any, Distilled()), Code(None), data, {})
    # All of them are small here.
    with patch.object(parallel, "LARGE_BYTES", 0):
        return build_machinery(
            make_training(**runtime),
            opened,
            plan or ModelPlan(None, None),
            world,
            with_weights=with_weights,
        )


def batch_of(slot: int) -> Tensors:
    generator = torch.Generator().manual_seed(slot)
    return {name: torch.randn(2, WIDTH, generator=generator) for name in ("x", "other")}


def train(
    machinery: Machinery, world: World, runtime: dict[str, Any], *, first: int = 0
) -> None:
    """Make the updates that are left of :data:`STEPS`, each over all slots."""
    gradients = build_gradient_sum(
        machinery.model,
        make_training(**runtime),
        slots_per_step=SLOTS,
        is_sharded=machinery.is_sharded,
        frozen=machinery.cut_frozen,
    )
    finish = build_finish(
        machinery.opened,
        machinery.modules,
        seed=7,
        frozen=machinery.held_frozen,
        cut=machinery.cut(),
    )
    for step in range(first, STEPS):
        gradients.begin(world)
        slots = range(world.rank, SLOTS, world.size)
        for slot in slots:
            gradients.before_backward(is_last=slot == slots[-1])
            with machinery.autocast():
                loss = machinery.loss_of(batch_of(SLOTS * step + slot), STAGE)
            (loss.total / (8 * WIDTH)).backward()
            gradients.after_backward()
        gradients.finish()
        assert machinery.optimizer is not None
        machinery.optimizer.step()
        finish(StepOutcome(step + 1, 1.0, {}, 8, "0" * 16, 0.1, 1.0, (), {}, 0.0), None)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(machinery: Machinery) -> dict[str, list[float]]:
    return {
        name: whole(value.detach()).flatten().double().tolist()
        for name, value in machinery.state().items()
    }


def difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    assert one.keys() == other.keys()
    return max(
        abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def compare_with_replicated(world: World, directory: Path) -> dict[str, Any]:
    one, other = build(world, REPLICATED), build(world, SHARDED)
    begun = difference(whole_state(other), whole_state(one))
    train(one, world, REPLICATED)
    train(other, world, SHARDED)
    roots: list[Any] = [*other.modules.trained.values(), *other.cut_frozen]
    passes = [len(root._get_fsdp_state()._comm_ctx.post_forward_order) for root in roots]
    parameters = {
        **dict(other.model.named_parameters()),
        **{
            f"frozen.{name}.{own}": parameter
            for name, module in other.modules.frozen.items()
            for own, parameter in module.named_parameters()
        },
    }
    mixed = build(world, {**SHARDED, "precision": "bf16-autocast"})
    train(mixed, world, SHARDED)
    return {
        "begun": begun,
        "mixed": difference(whole_state(mixed), whole_state(one)),
        "trained": difference(whole_state(other), whole_state(one)),
        "moved": difference(whole_state(other), whole_state(build(world, SHARDED))),
        "names": sorted(other.state()),
        "whole": sorted(n for n, p in parameters.items() if not isinstance(p, DTensor)),
        "frozen": [dict(one.frozen), dict(other.frozen)],
        "passes": passes,
        "kept": other.modules.kept["centre"].tolist(),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_modules_train_like_whole_ones(tmp_path: Path, size: int) -> None:
    ranks = processes.values(
        processes.run_world(compare_with_replicated, size=size, directory=tmp_path / "run")
    )
    for found in ranks:
        assert found["begun"] == 0
        # The additions have another order, and nothing else differs.
        assert found["trained"] < 1e-5 < 1e-3 < found["moved"]
        # Adam makes steps of one size: where gradients are nearly zero, products in bf16 turn some around.
        assert found["trained"] < found["mixed"] < 2.1 * STEPS * 1e-2
        # Frozen modules are sharded, too, except for the module that is called with other weights.
        assert found["whole"] and all(
            n.startswith("frozen.target.") for n in found["whole"]
        )
        # The hash of a frozen module does not depend on how it is held.
        assert found["frozen"][0] == found["frozen"][1] == ranks[0]["frozen"][0]
        assert found["kept"] == ranks[0]["kept"]
        # torch remembers no pass of a module that no backward pass came through.
        assert set(found["passes"]) == {0}
    names = ranks[0]["names"]
    assert len(names) == len(set(names))
    prefixes = {
        "encoder.",
        "predictor.",
        "optimizer.encoder.",
        "optimizer.predictor.",
        "kept.",
    }
    assert {p for p in prefixes if any(name.startswith(p) for name in names)} == prefixes
    assert not any("teacher" in name or "projector" in name for name in names)


def train_and_save(
    world: World, directory: Path, *, runtime: dict[str, Any], goes_on: bool
) -> dict[str, Any]:
    """Train the first step and save, or restore, and train the rest."""
    machinery = build(world, runtime, with_weights=not goes_on)
    manager = CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint.model_validate({"asynchronous": False}),
        identity=IDENTITY,
        on_event=lambda type_, fields: None,
        store=open_store(directory, medium=Medium(stale_seconds=0.2)),
    )
    if goes_on:
        restored = manager.restore(machinery.state())
        assert restored is not None and restored.step == STEPS
    else:
        train(machinery, world, runtime)
        manager.save(STEPS, machinery.state(), extra={"step": STEPS}, wait=True)
    manager.close()
    return {"state": whole_state(machinery), "frozen": dict(machinery.frozen)}


@pytest.mark.long
def test_a_checkpoint_of_several_modules_is_restored_by_other_numbers_of_processes(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    (saved, *_) = processes.values(
        processes.run_world(
            train_and_save, size=2, directory=directory, runtime=SHARDED, goes_on=False
        )
    )
    worlds: tuple[tuple[int, dict[str, Any]], ...] = (
        (4, SHARDED),
        (4, {**SHARDED, "shards": 2}),
        (2, SHARDED),
        (2, REPLICATED),
        (1, SHARDED),
    )
    for size, runtime in worlds:
        restored = processes.values(
            processes.run_world(
                train_and_save,
                size=size,
                directory=directory,
                runtime=runtime,
                goes_on=True,
            )
        )
        assert all(one == saved for one in restored)


def alter(world: World, directory: Path) -> dict[str, Any]:
    """Return the reports of ranks of two copies when rank 1's part was altered."""
    found = {}
    for what in ("frozen", "kept", "trained"):
        machinery = build(world, {**SHARDED, "shards": 2} if world.size > 2 else SHARDED)
        compare = build_comparison(machinery, Membership(world))
        compare(1)
        tensor: Any = {
            "frozen": machinery.modules.frozen["teacher"].scale,
            "kept": machinery.modules.kept["centre"],
            "trained": machinery.modules.trained["predictor"].weight,
        }[what]
        if world.rank == 1:
            held = tensor.detach()
            held = held.to_local() if isinstance(held, DTensor) else held
            held.view(torch.int32).view(-1)[0] ^= 1 << 21
        try:
            compare(1)
        except (DivergedError, HostError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def test_changes_on_one_rank_are_detected(tmp_path: Path) -> None:
    (first, second) = processes.values(
        processes.run_world(alter, size=2, directory=tmp_path / "two")
    )
    # Only the rank that holds a frozen part can detect the change; it leaves, and its group forms again.
    assert "frozen" not in first and second["frozen"].startswith("HostError: ")
    assert (
        "the frozen modules teacher have changed since they were built" in second["frozen"]
    )
    for found in (first, second):
        assert "one of ranks 0 and 1 is wrong" in found["kept"]
        # One copy: no other rank holds that part of the weight.
        assert "trained" not in found
    ranks = processes.values(
        processes.run_world(alter, size=4, directory=tmp_path / "four")
    )
    for found in ranks:
        assert "by majority that of rank 1 is wrong" in found["kept"]
        assert "one of ranks 1 and 3 is wrong" in found["trained"]


def alter_everywhere(world: World, directory: Path) -> dict[str, str]:
    """Return the error when every rank alters a frozen module, at the next stage and in a comparison."""
    found = {}
    machinery = build(world, SHARDED)
    finish = build_finish(
        machinery.opened, machinery.modules, seed=7, frozen=machinery.held_frozen
    )
    compare = build_comparison(machinery, Membership(world))
    outcome = StepOutcome(1, 1.0, {}, 8, "0" * 16, 0.1, 1.0, (), {}, 0.0)
    finish(outcome, STAGE)
    teacher: Any = machinery.modules.frozen["teacher"]
    with torch.no_grad():
        teacher.scale.mul_(2)
    for name, call in {
        "stage": lambda: finish(outcome, STAGE),
        "compare": lambda: compare(1),
    }.items():
        try:
            call()
        except (TaskError, TaskInputError) as error:
            found[name] = str(error)
    return found


def test_a_task_that_changes_a_sharded_frozen_module_gets_an_error(tmp_path: Path) -> None:
    ranks = processes.values(
        processes.run_world(alter_everywhere, size=2, directory=tmp_path / "run")
    )
    for found in ranks:
        assert found.keys() == {"stage", "compare"}
        for said in found.values():
            assert "the frozen modules teacher have changed since they were built" in said


class Calling(Distilled):
    """Calls modules between steps; the teacher has weights of two types."""

    def build(self, build_model: Any) -> Modules:
        modules = super().build(build_model)
        extra = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        modules.frozen["teacher"].register_parameter("extra", extra)
        return modules

    def enter(self, modules: Modules, stage: Stage) -> None:
        super().enter(modules, stage)
        modules.kept["centre"].copy_(modules.frozen["teacher"](torch.ones(1, WIDTH))[0])

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        super().after_update(modules, metrics)
        for module in (modules.frozen["teacher"], modules.trained["encoder"]):
            modules.kept["centre"].add_(module(torch.ones(1, WIDTH))[0])


def call_between_steps(world: World, directory: Path) -> dict[str, Any]:
    machinery = build(world, SHARDED, task=Calling())
    finish = build_finish(
        machinery.opened,
        machinery.modules,
        seed=7,
        frozen=machinery.held_frozen,
        cut=machinery.cut(),
    )
    compare, before = (
        build_comparison(machinery, Membership(world)),
        set(machinery.own_state()),
    )
    outcome = StepOutcome(1, 1.0, {}, 8, "0" * 16, 0.1, 1.0, (), {}, 0.0)
    for entered in (None, STAGE):
        finish(outcome, entered)
        compare(1)
    parameters = [*machinery.model.parameters()]
    parameters += [one for module in machinery.cut_frozen for one in module.parameters()]
    return {
        "whole": sum(not isinstance(one, DTensor) for one in parameters),
        "lost": sorted(before - set(machinery.own_state())),
    }


def test_modules_that_a_task_calls_between_steps_are_resharded_afterwards(
    tmp_path: Path,
) -> None:
    ranks = processes.values(
        processes.run_world(call_between_steps, size=2, directory=tmp_path / "run")
    )
    assert ranks == [{"whole": 0, "lost": []}] * 2


class Leaving(Distilled):
    """Rank 1 exits before the others gather a weight."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        if self.rank == 1:
            raise KeyboardInterrupt
        super().after_update(modules, metrics)


def lose_a_peer(world: World, directory: Path) -> dict[str, Any]:
    machinery = build(world, SHARDED, task=Leaving(world.rank))
    machinery.opened.code._folder = Path(__file__).resolve().parent
    try:
        train(machinery, world, SHARDED)
    except KeyboardInterrupt:
        return {}
    except (RuntimeError, TaskError, TaskInputError) as error:
        is_of_a_peer = is_peer_error(error, world_size=world.size)
        return {"type": type(error).__name__, "is_of_a_peer": is_of_a_peer}
    return {}


def test_a_peer_lost_while_a_weight_is_gathered_is_not_an_error_of_the_task(
    tmp_path: Path,
) -> None:
    (first, _) = processes.values(
        processes.run_world(lose_a_peer, size=2, directory=tmp_path / "run")
    )
    assert first["is_of_a_peer"] and "Task" not in first["type"], first


class Careless(Distilled):
    """Uses weights where ranks hold parts of them."""

    def __init__(self, where: str) -> None:
        self.where = where

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        predictor: Any = modules.trained["predictor"]
        if self.where == "after_update":
            modules.kept["centre"].lerp_(predictor.bias, 0.5)

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        predictor: Any = modules.trained["predictor"]
        x = batch["x"]
        if self.where == "weight":
            return Loss(nn.functional.linear(x, predictor.weight).sum())
        if self.where == "functional_call":
            other = {
                name: torch.zeros(value.shape)
                for name, value in predictor.named_parameters()
            }
            return Loss(functional_call(predictor, other, (x,)).sum())
        return Loss(predictor(x).sum())


def use_carelessly(world: World, directory: Path) -> dict[str, str]:
    found = {}
    for where in ("weight", "functional_call", "after_update"):
        machinery = build(world, SHARDED, task=Careless(where))
        machinery.opened.code._folder = Path(__file__).resolve().parent
        try:
            train(machinery, world, SHARDED)
        except (TaskError, TaskInputError) as error:
            found[where] = str(error)
    return found


def test_use_of_sharded_weights_as_whole_ones_is_refused_with_the_line(
    tmp_path: Path,
) -> None:
    ranks = processes.values(
        processes.run_world(use_carelessly, size=2, directory=tmp_path / "run")
    )
    for found in ranks:
        assert found.keys() == {"weight", "functional_call", "after_update"}
        assert all("test_sharded_modules.py:" in said for said in found.values())
        for where in ("weight", "after_update"):
            assert (
                "a weight that is cut (fsdp2) is whole only while its module is called"
                in found[where]
            )
            assert "full_tensor" in found[where] and "Modules.replicated" in found[where]
        assert (
            "Linear is called with weights that are not its own" in found["functional_call"]
        )
        assert "Modules.replicated" in found["functional_call"]


class Preferring(Distilled):
    """A language model with a frozen model, both as described by the file."""

    def build(self, build_model: Any) -> Modules:
        return Modules({"model": build_model()}, {"reference": build_model()})

    def enter(self, modules: Modules, stage: Stage) -> None: ...

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None: ...

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        ids = torch.arange(24).reshape(2, 12)
        with torch.no_grad():
            before = modules.frozen["reference"](input_ids=ids).logits
        return Loss(
            (modules.trained["model"](input_ids=ids).logits - before).square().sum()
        )


def build_with_reference(world: World, directory: Path) -> dict[str, Any]:
    settings = make_training().model
    plan = plan_model(settings, base_directory=directory, vocab_size=257)
    found: dict[str, Any] = {"hashes": [], "losses": []}
    for runtime, with_weights in (
        (REPLICATED, True),
        (SHARDED, True),
        (SHARDED, False),
        (REPLICATED, False),
    ):
        machinery = build(
            world, runtime, task=Preferring(), plan=plan, with_weights=with_weights
        )
        found["hashes"].append(dict(machinery.frozen))
        if runtime is SHARDED:
            parameters = machinery.modules.frozen["reference"].parameters()
            assert all(isinstance(one, DTensor) for one in parameters)
        if with_weights:
            found["losses"].append(float(machinery.loss_of({}, STAGE).total))
        if machinery.is_sharded:
            reshard(*machinery.modules.trained.values(), *machinery.cut_frozen)
    return found


def test_a_frozen_copy_of_the_configured_model_has_its_weights_although_a_checkpoint_follows(
    tmp_path: Path,
) -> None:
    """The trained one gets them from the checkpoint, which holds nothing of the frozen one."""
    ranks = processes.values(
        processes.run_world(build_with_reference, size=2, directory=tmp_path / "run")
    )
    for found in ranks:
        assert all(one == ranks[0]["hashes"][0] for one in found["hashes"])
        # It is a copy of the trained module before the first step.
        assert found["losses"] == [0.0, 0.0]


class Remembering(Distilled):
    """Reads a weight, or changes one, before the first step."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.before: torch.Tensor | None = None

    def build(self, build_model: Any) -> Modules:
        model = build_model()
        if self.where == "build":
            with torch.no_grad():
                model.get_input_embeddings().weight.zero_()
        return Modules({"model": model})

    def enter(self, modules: Modules, stage: Stage) -> None:
        if self.where == "enter":
            weight = modules.trained["model"].get_input_embeddings().weight  # type: ignore[operator]
            self.before = full_tensor(weight).detach().clone()

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None: ...


def remember(world: World, directory: Path) -> dict[str, Any]:
    plan = plan_model(make_training().model, base_directory=directory, vocab_size=257)
    found: dict[str, Any] = {}
    for where in ("nowhere", "build", "enter"):
        for kind, runtime in (("whole", REPLICATED), ("cut", SHARDED)):
            task = Remembering(where)
            machinery = build(world, runtime, task=task, plan=plan)
            weight: Any = machinery.modules.trained["model"]
            table = whole(weight.get_input_embeddings().weight).detach()
            found[f"{where}, {kind}"] = {
                "table": float(table.abs().sum()),
                "remembered": None
                if task.before is None
                else torch.equal(task.before, table),
            }
    return found


def test_a_task_that_reads_or_changes_initial_weights_gets_those_of_a_whole_model(
    tmp_path: Path,
) -> None:
    """Weights that are made after the cut would be read as nothing, and changes of them would be lost."""
    ranks = processes.values(
        processes.run_world(remember, size=2, directory=tmp_path / "run")
    )
    for found in ranks:
        for where in ("nowhere", "build", "enter"):
            assert found[f"{where}, cut"] == found[f"{where}, whole"]
        assert found["build, cut"]["table"] == 0 < found["nowhere, cut"]["table"]
        assert found["enter, cut"]["remembered"] is True


class Hooked(Distilled):
    """Keeps some of a weight still by a hook on its gradient."""

    def build(self, build_model: Any) -> Modules:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight.register_hook(lambda gradient: gradient * 0)
        return Modules({"encoder": layer})

    def enter(self, modules: Modules, stage: Stage) -> None: ...


def test_hooks_on_gradients_are_refused_with_sharded_modules() -> None:
    """By a process alone, too: it may be joined by others."""
    world = World(1, rank=0, size=1, device=torch.device("cpu"))
    build(world, REPLICATED, task=Hooked())
    with pytest.raises(TaskInputError) as raised:
        build(world, SHARDED, task=Hooked())
    assert "fsdp2 cannot cut encoder.weight, whose gradient has a hook" in str(raised.value)
    assert "parallelism: dataParallel" in str(raised.value)

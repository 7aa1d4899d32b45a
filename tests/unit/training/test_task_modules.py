"""Modules that could not be saved, trained or cut over ranks are refused as wrong input before any step; frozen
ones stay as they were built."""

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import HostError, TaskInputError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models import parallel
from evergrad_trainer.models.build import ModelPlan
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Modules, Snapshot
from evergrad_trainer.training import build
from evergrad_trainer.training.frozen import compare_frozen, hash_frozen
from evergrad_trainer.training.modules import (
    check_modules,
    choose_deferred,
    module_problems,
    plan_cuts,
    trained_blocks,
)
from evergrad_trainer.training.step_parts import StepOutcome
from evergrad_trainer.training.task_adapter import build_finish
from evergrad_trainer.worker.sync_state import _check_frozen

MANIFEST: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
    "batching": {"globalBatchSize": 4, "microBatchSize": 2},
    "optimizer": {"learningRate": 1e-3},
    "horizon": {"steps": 3},
}
PLAIN = Training.model_validate(MANIFEST)
SHARDED = Training.model_validate({**MANIFEST, "runtime": {"parallelism": "fsdp2"}})


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.acceptance("8d-16e")
@pytest.mark.parametrize(
    "name",
    ["optimizer", "counters", "kept", "frozen", "cursor", "an.encoder", "", "forward"],
)
def test_a_trained_module_must_not_have_the_name_of_another_part_of_the_state(
    name: str,
) -> None:
    modules = Modules({"model": linear(), name: linear()})
    with pytest.raises(TaskInputError, match="build names a trained module"):
        check_modules(modules, PLAIN, Code(None))


@pytest.mark.capability("G-30")
def test_several_trained_modules_with_unique_names_are_accepted() -> None:
    modules = Modules({"encoder": linear(), "head": linear()}, {"target": linear()})
    assert module_problems(modules, PLAIN) == []


def test_modules_without_trainable_parameters_are_refused() -> None:
    frozen = linear().requires_grad_(False)
    for modules in (Modules({}), Modules({"model": frozen})):
        (problem,) = module_problems(modules, PLAIN)
        assert "nothing to train" in problem.what


def test_a_parameter_cannot_be_trained_and_frozen() -> None:
    model = linear()
    (problem,) = module_problems(Modules({"model": model}, {"teacher": model}), PLAIN)
    assert "as trained and as frozen" in problem.what


class Tied(nn.Module):
    """Two blocks that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear(), linear()])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class Scalar(nn.Linear):
    """A weight and a temperature."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.temperature = nn.Parameter(torch.ones(()))


class Mixed(nn.Linear):
    """Weights of two types."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def sharing() -> Modules:
    encoder, head = linear(), linear()
    head.weight = encoder.weight
    return Modules({"encoder": encoder, "head": head})


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (sharing(), "shared parameter encoder.weight; it is also head.weight"),
        (Modules({"model": Tied()}), "blocks.0.weight; it is also model.blocks.1.weight"),
        (
            Modules({"parts": nn.ModuleList([linear()])}),
            "the module parts; its weights are",
        ),
        (
            Modules({"head": Scalar()}),
            "the parameter head.temperature; it has no dimension",
        ),
        (Modules({"head": Mixed()}), "have the types bfloat16, float32"),
    ],
)
def test_modules_that_fsdp2_cannot_shard_are_refused_for_any_world_size(
    modules: Modules, words: str
) -> None:
    assert module_problems(modules, PLAIN) == []
    (problem,) = module_problems(modules, SHARDED)
    assert problem.path == "spec.training.runtime.parallelism" and words in str(problem)
    assert PLAIN.runtime.parallelism == "dataParallel"
    assert "parallelism: dataParallel; a run goes on from its checkpoints with it" in str(
        problem
    )


def test_fsdp2_supports_several_trained_modules_and_kept_tensors() -> None:
    modules = Modules(
        {"encoder": linear(), "head": linear()}, kept={"mean": torch.zeros(2)}
    )
    assert module_problems(modules, SHARDED) == []
    assert list(plan_cuts(modules)) == ["encoder", "head"]


def test_a_large_frozen_module_is_sharded_unless_the_task_needs_it_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "LARGE_BYTES", 24)
    frozen = {
        "large": linear(),
        "small": nn.Linear(1, 1),
        "parts": nn.ModuleList([linear()]),
    }
    modules = Modules({"model": linear()}, frozen)
    (problem,) = module_problems(modules, SHARDED)
    assert "the module frozen.parts" in problem.what
    assert "name the frozen module in Modules.replicated" in problem.remedy
    modules.replicated = ["parts"]
    assert module_problems(modules, SHARDED) == []
    assert list(plan_cuts(modules)) == ["model", "frozen.large"]
    modules.replicated = ["model"]
    (problem,) = module_problems(modules, PLAIN)
    assert "Modules.replicated names model" in problem.what


def test_a_snapshot_is_sharded_like_its_source_at_any_size() -> None:
    """If it was whole, it would compute in another dtype than the sharded model."""
    snapshots = {"reference": Snapshot("model", 3)}
    frozen = {"reference": linear(), "teacher": linear()}
    modules = Modules({"model": linear()}, frozen, snapshots=snapshots)
    assert list(plan_cuts(modules)) == ["model", "frozen.reference"]
    modules.replicated = ["reference"]
    assert list(plan_cuts(modules)) == ["model"]
    # Neither is cut without weights: there is nothing to gather.
    empty = Modules({"model": nn.ReLU()}, {"reference": nn.ReLU()}, snapshots=snapshots)
    assert list(plan_cuts(empty)) == []


def test_a_small_frozen_module_is_sharded_if_the_task_compares_it_with_a_trained_one() -> (
    None
):
    frozen = {"reference": linear(), "teacher": linear()}
    modules = Modules({"model": linear()}, frozen, counterparts=["reference"])
    assert module_problems(modules, SHARDED) == []
    assert list(plan_cuts(modules)) == ["model", "frozen.reference"]
    modules.replicated = ["reference"]
    assert list(plan_cuts(modules)) == ["model"]

    modules.replicated, modules.counterparts = [], ["model"]
    (problem,) = module_problems(modules, PLAIN)
    assert problem.what == "Modules.counterparts names model"


def test_blocks_of_a_compared_frozen_module_are_compiled_like_the_trained_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    model, reference, teacher = Tied(), Tied(), Tied()
    modules = Modules(
        {"model": model},
        {"reference": reference, "teacher": teacher},
        counterparts=["reference"],
    )
    assert build._compile_blocks(modules)
    assert compiled == [*model.blocks, *reference.blocks]


def test_a_frozen_module_with_two_dtypes_can_be_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "LARGE_BYTES", 0)
    modules = Modules({"model": linear()}, {"teacher": Mixed()})
    assert list(plan_cuts(modules)) == ["model", "frozen.teacher"]
    assert module_problems(modules, SHARDED) == []


def test_each_trained_module_has_its_own_blocks() -> None:
    encoder, decoder, named = Tied(), Tied(), Tied()
    modules = Modules(
        {"encoder": encoder, "decoder": decoder, "named": named}, blocks=[named.blocks[1]]
    )
    assert trained_blocks(modules) == [*encoder.blocks, *decoder.blocks, named.blocks[1]]
    cuts = plan_cuts(modules)
    assert cuts["decoder"].units() == [*decoder.blocks, decoder]
    assert cuts["named"].units() == [named.blocks[1], named]


def test_a_frozen_module_that_changes_is_an_error_of_the_task() -> None:
    class Renewing:
        def after_update(self, modules: Modules, metrics: Any) -> None: ...

        def enter(self, modules: Modules, stage: Any) -> None:
            for parameter in modules.frozen["teacher"].parameters():
                parameter.add_(1)

    modules = Modules({"model": linear()}, {"teacher": linear()})
    opened = cast(Opened, SimpleNamespace(task=Renewing(), code=Code(None)))
    finish = build_finish(opened, modules, seed=7, frozen=hash_frozen(modules))
    outcome = StepOutcome(3, 1.0, {}, 4, "0" * 16, 0.1, 1.0, (), {}, 0.0)
    finish(outcome, None)
    with pytest.raises(Exception, match="the frozen modules teacher have changed"):
        finish(outcome, cast(Any, "second"))


def test_the_hash_of_a_frozen_module_depends_on_all_its_bits() -> None:
    module = linear()
    before = hash_frozen(Modules({}, {"teacher": module}))
    assert before == hash_frozen(Modules({}, {"teacher": module}))
    with torch.no_grad():
        next(module.parameters())[1, 1] += 1e-6
    assert before != hash_frozen(Modules({}, {"teacher": module}))


def test_a_frozen_module_that_changes_on_one_rank_alone_is_a_host_fault() -> None:
    modules = Modules({"model": linear()}, {"teacher": linear()})
    built = hash_frozen(modules)

    def compare(other: int) -> None:
        # The other rank reports how many frozen modules have changed there.
        world = SimpleNamespace(gather_integers=lambda value: [value, other])
        compare_frozen(modules, built, cast(World, world), code=Code(None))

    compare(0)
    compare(1)
    next(modules.frozen["teacher"].parameters()).data[0, 0] += 1
    with pytest.raises(HostError, match="the frozen modules teacher have changed"):
        compare(0)
    with pytest.raises(
        TaskInputError, match=r"Keep what changes as tensors in Modules\.kept"
    ):
        compare(1)


def test_a_host_with_a_different_frozen_module_does_not_end_the_others() -> None:
    def refuse(rank: int, *, steps: list[int]) -> bool:
        world = World(1, rank=rank, size=3, device=torch.device("cpu"))
        try:
            _check_frozen(
                world, [{"teacher": "a"}, {"teacher": "a"}, {"teacher": "b"}], steps
            )
        except HostError:
            return True
        return False

    assert [refuse(rank, steps=[-1, -1, -1]) for rank in range(3)] == [False, False, True]
    # The ranks whose state is continued are correct, even if they are few.
    assert [refuse(rank, steps=[-1, -1, 8]) for rank in range(3)] == [True, True, False]


@pytest.mark.capability("G-23")
def test_deterministic_kernels_are_chosen_before_any_module_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append("modules")
        raise InterruptedError("enough was seen")

    monkeypatch.setattr(build, "choose_determinism", lambda *_: seen.append("determinism"))
    monkeypatch.setattr(build, "attention_shape", lambda *_, **__: None)
    monkeypatch.setattr(build, "choose_kernels", lambda *_, **__: None)
    monkeypatch.setattr(build, "_build_modules", note)
    world = World(1, rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(InterruptedError, match="enough was seen"):
        build.build_machinery(
            PLAIN, cast(Opened, None), ModelPlan(None, None), world, with_weights=True
        )
    assert seen == ["determinism", "modules"]


@pytest.mark.capability("O-33")
@pytest.mark.parametrize("asks", [True, False])
def test_a_resume_rebuilds_only_for_the_configured_model_after_freeing_the_first_set(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """A frozen copy of the file's model is in no checkpoint, and needs its weights."""
    made: list[tuple[bool, weakref.ref[nn.Module]]] = []

    def make(*args: Any, with_weights: bool = True, **kwargs: Any) -> nn.Module:
        assert all(one() is None for _, one in made)
        model = linear()
        model.itself = [model]  # type: ignore[assignment]
        made.append((with_weights, weakref.ref(model)))
        return model

    class Asking:
        num_built = 0

        def build(self, build_model: Any) -> Modules:
            self.num_built += 1
            return Modules(
                {"model": linear()}, {"teacher": build_model() if asks else linear()}
            )

        def enter(self, modules: Modules, stage: Any) -> None: ...

    monkeypatch.setattr(build, "build_model", make)
    task, data = Asking(), SimpleNamespace(train=SimpleNamespace(stages=(None,)))
    opened = cast(Opened, SimpleNamespace(task=task, code=Code(None), data=data))
    plan = cast(ModelPlan, SimpleNamespace(config=object()))
    build._build_modules(PLAIN, opened, plan, with_weights=False)
    assert task.num_built == (2 if asks else 1)
    assert [with_weights for with_weights, _ in made] == ([False, True] if asks else [])


@pytest.mark.parametrize(
    ("snapshots", "why"),
    [
        ({"other": Snapshot("model", 3)}, "it is no frozen module"),
        ({"reference": Snapshot("head", 3)}, "'head' is no trained module"),
        ({"reference": Snapshot("model", 0)}, "steps count from 1"),
        (
            {"wider": Snapshot("model", 3)},
            "not named, shaped and typed as those of 'model'",
        ),
    ],
)
def test_a_snapshot_that_could_not_be_taken_is_refused(
    snapshots: dict[str, Snapshot], why: str
) -> None:
    frozen = {"reference": linear(), "wider": nn.Linear(2, 3)}
    modules = Modules({"model": linear()}, frozen, snapshots=snapshots)
    (problem,) = module_problems(modules, PLAIN)
    assert "cannot be taken" in problem.what and why in problem.why


def test_the_weights_of_a_snapshot_are_not_hashed_as_built_modules() -> None:
    frozen = {"reference": linear(), "teacher": linear()}
    snapshots = {"reference": Snapshot("model", 3)}
    modules = Modules({"model": linear()}, frozen, snapshots=snapshots)
    assert module_problems(modules, PLAIN) == []
    assert hash_frozen(modules).keys() == {"teacher"}
    assert hash_frozen(modules, ["reference"]).keys() == {"reference"}


class Deferred:
    """A model whose weights do not exist yet."""

    def __init__(self) -> None:
        self.model, self.weights = linear(), iter(())


@pytest.mark.parametrize("with_weights", [True, False])
def test_no_weights_are_initialised_for_a_snapshot(with_weights: bool) -> None:
    """It gets the weights of its trained module; creating or reading others would take as long as the
    model's."""
    model, reference, teacher = made = [Deferred() for _ in range(3)]
    frozen = {"reference": reference.model, "teacher": teacher.model}
    snapshots = {"reference": Snapshot("model", 3)}
    modules = Modules({"model": model.model}, frozen, snapshots=snapshots)
    used = choose_deferred(cast(Any, made), modules, with_weights=with_weights)
    assert used == made
    has_weights = [one.weights is not None for one in (model, reference, teacher)]
    assert has_weights == [with_weights, False, True]


@pytest.mark.acceptance("input-G-29")
@pytest.mark.capability("G-29")
def test_a_module_that_cannot_be_moved_to_its_device_is_named() -> None:
    class Stuck(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("out of memory")

    given = Modules(trained={"encoder": nn.Linear(1, 1), "predictor": Stuck(1, 1)})
    with pytest.raises(torch.OutOfMemoryError) as failed:
        build._move_to(torch.device("cpu"), given, (), cast(Any, None))
    assert failed.value.__notes__ == ["while the module predictor was moved to cpu"]


@pytest.mark.capability("G-29")
def test_modules_on_the_cpu_are_unchanged_if_the_run_uses_the_cpu() -> None:
    modules = Modules(trained={"encoder": linear()}, frozen={"teacher": linear()})
    parts = (modules.trained["encoder"], modules.frozen["teacher"])
    before = [(one, one.data_ptr()) for part in parts for one in part.parameters()]
    build._move_to(torch.device("cpu"), modules, (), cast(Any, None))
    after = [(one, one.data_ptr()) for part in parts for one in part.parameters()]
    assert all(one is other for (one, _), (other, _) in zip(before, after, strict=True))
    assert [where for _, where in before] == [where for _, where in after]

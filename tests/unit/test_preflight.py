"""Preflight's checks: values in, findings out."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evergrad_manifest.reading.validation import parse_run
from evergrad_manifest.training import Model, Training
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.base.machine import Machine
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.models.memory import ModelFacts, checkpoint_bytes
from evergrad_trainer.preflight.checks import (
    check_cadences,
    check_device,
    check_files,
    check_model,
    check_run_directory,
    check_shards,
    check_workers,
    examine,
    find_traps,
)
from evergrad_trainer.preflight.memory import Finding, check_memory, hidden_size_of

MACHINE = Machine(
    cores=2,
    memory_bytes=2**30,
    num_accelerators=0,
    accelerator_memory_bytes=None,
    has_cpp_compiler=True,
)
FACTS = ModelFacts(
    parameters=10**6, hidden_size=64, num_layers=2, vocab_size=257, max_positions=128
)


def training(**changes: Any) -> Training:
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 64},
        "batching": {"globalBatchSize": 8, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 100},
    }
    return Training.model_validate(values | changes)


def test_overfit_first_batch_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text("{}")
    data = {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 64}
    found = [*check_files(training(data={**data, "overfitFirstBatch": True}), tmp_path)]
    assert [one.level for one in found] == ["ok", "warning"]
    assert "each step train on the samples of the first" in str(found[1].problem)
    assert [one.level for one in check_files(training(data=data), tmp_path)] == ["ok"]


def only(findings: Any) -> Finding:
    (finding,) = findings
    assert isinstance(finding, Finding)
    return finding


def test_missing_empty_and_valid_files_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "good.jsonl").write_text('{"text": "x"}\n')
    names = ["missing", "empty", "good"]
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in names]
    found = list(
        check_files(training(data={"sources": sources, "sequenceLength": 64}), tmp_path)
    )
    assert [finding.level for finding in found] == ["error", "error", "ok"]
    assert [finding.problem.path for finding in found] == [
        str(tmp_path / f"{name}.jsonl") for name in names
    ]
    assert (
        "missing.jsonl: does not exist; spec.training.data.sources[0].path names it"
        in str(found[0].problem)
    )
    assert "empty.jsonl: is empty; spec.training.data.sources[1].path names it" in str(
        found[1].problem
    )


def test_evaluation_files_are_checked_too_and_folders_by_their_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "docs.jsonl").write_text("{}\n")
    (tmp_path / "folder").mkdir()
    evaluation = {"sources": [{"name": "other", "path": "folder"}]}
    found = list(check_files(training(evaluation=evaluation), tmp_path))
    assert [finding.level for finding in found] == ["ok", "error"]
    assert "folder: contains no file whose name ends in .jsonl" in str(found[1].problem)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "folder" / name).write_text("{}\n")
    found = list(check_files(training(evaluation=evaluation), tmp_path))
    assert str(found[1].problem) == f"{tmp_path / 'folder'}: 6 bytes in 2 files."


@pytest.mark.parametrize(
    ("workers", "level"), [(1, "ok"), (2, "ok"), (3, "warning"), (4, "ok"), (5, "error")]
)
def test_workers_must_each_have_a_slot_and_should_have_equal_shares(
    workers: int, level: str
) -> None:
    finding = only(check_workers(training(), num_workers=workers))
    assert finding.level == level
    assert finding.problem.path == "spec.workersPerNode"


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ([4, 8, 12], None),
        ([4], None),
        ([1], None),
        ([2, 4], 2),
        ([4, 5, 6], 5),
        ([6, 12, 18, 24], 6),
    ],
)
def test_any_number_of_workers_can_be_split_into_replicas_of_the_model(
    sizes: list[int], refused: int | None
) -> None:
    plan = training(runtime={"parallelism": "fsdp2", "shards": 4})
    findings = list(check_shards(plan, world_sizes=sizes))
    assert [one.problem.what for one in findings] == (
        [] if refused is None else [f"{refused} workers cannot be cut into copies of 4"]
    )
    assert not list(check_shards(training(), world_sizes=sizes))


def test_idle_time_is_reported_as_a_share() -> None:
    assert "3 workers share 4 slots: 33% of their time is idle" in str(
        only(check_workers(training(), num_workers=3)).problem
    )


@pytest.mark.capability("G-X25")
def test_memory_is_sufficient_insufficient_or_unknown() -> None:
    assert (
        only(check_memory(training(), FACTS, MACHINE, num_workers=1, world_size=1)).level
        == "ok"
    )
    small = replace(MACHINE, memory_bytes=10 * 2**20)
    finding = only(check_memory(training(), FACTS, small, num_workers=1, world_size=1))
    assert finding.level == "error"
    assert "1,000,000 parameters need about" in str(
        finding.problem
    ) and "MiB are there" in str(finding.problem)
    assert (
        only(
            check_memory(
                training(),
                FACTS,
                replace(MACHINE, memory_bytes=None),
                num_workers=1,
                world_size=1,
            )
        ).level
        == "warning"
    )


def test_replicas_on_one_machine_use_memory_in_total_and_shards_do_not() -> None:
    machine = replace(MACHINE, memory_bytes=40 * 2**20)
    sharded, facts = (
        training(runtime={"parallelism": "fsdp2"}),
        replace(FACTS, num_layers=8),
    )
    assert (
        only(check_memory(training(), facts, machine, num_workers=1, world_size=1)).level
        == "ok"
    )
    assert (
        only(check_memory(training(), facts, machine, num_workers=4, world_size=4)).level
        == "error"
    )
    assert (
        only(check_memory(sharded, facts, machine, num_workers=4, world_size=4)).level
        == "ok"
    )


@pytest.mark.acceptance("input-G-21")
@pytest.mark.capability("O-23", "O-30", "G-X11", "G-X25")
def test_requested_devices_and_compilers_must_exist() -> None:
    assert list(check_device(training(), MACHINE)) == []
    assert "no cuda device is visible" in str(
        only(check_device(training(runtime={"device": "cuda"}), MACHINE)).problem
    )
    without = replace(MACHINE, has_cpp_compiler=False)
    compiled = training(runtime={"compile": "on"})
    assert list(check_device(compiled, MACHINE)) == []
    device = replace(without, num_accelerators=1)
    automatic = only(check_device(training(), device))
    assert automatic.level == "warning" and "trains without compilation" in str(
        automatic.problem
    )
    assert only(check_device(compiled, device)).level == "error"
    assert list(check_device(training(runtime={"compile": "off"}), device)) == []
    assert "Install g++, or use compile: off" in str(
        only(check_device(compiled, without)).problem
    )
    assert list(check_device(training(), without)) == []


def test_samples_must_fit_the_positions_of_the_model() -> None:
    assert list(check_model(training(), FACTS)) == []
    assert list(check_model(training(), replace(FACTS, max_positions=None))) == []
    finding = only(check_model(training(), replace(FACTS, max_positions=63)))
    assert (
        finding.level == "error"
        and "64 is above the model's max_position_embeddings 63" in str(finding.problem)
    )


def test_settings_that_never_take_effect_give_a_warning() -> None:
    sources = [{"name": "other", "path": "other.jsonl"}]
    sets = [{"name": "other", "every": {"steps": 101}}]
    evaluation = {"every": {"steps": 500}, "sources": sources, "sets": sets}
    late = training(
        checkpoint={"every": {"steps": 101}},
        evaluation=evaluation,
        logging={"profile": {"firstStep": 101}},
    )
    levels = {f.problem.path: f.level for f in check_cadences(late, total=100)}
    assert levels == {
        "spec.training.checkpoint.every.steps": "warning",
        "spec.training.evaluation.every.steps": "warning",
        "spec.training.evaluation.sets[0].every.steps": "warning",
        "spec.training.logging.profile.firstStep": "warning",
    }
    in_tokens = training(checkpoint={"every": {"tokens": 51_201}})
    assert only(check_cadences(in_tokens, total=100)).level == "warning"
    for fine in ({"every": {"steps": 100}}, {"every": {"tokens": 51_200}}, {}):
        assert list(check_cadences(training(checkpoint=fine), total=100)) == []


@pytest.mark.acceptance("8d-8d", "input-4e-2")
@pytest.mark.capability("A-56")
def test_an_evaluation_only_at_the_end_is_reported_if_there_is_evaluation_data() -> None:
    sources = [{"name": "other", "path": "other.jsonl"}]

    def said(evaluation: dict[str, Any]) -> list[str]:
        return [
            str(one.problem)
            for one in check_cadences(training(evaluation=evaluation), total=100)
        ]

    assert said({"sources": sources}) == [
        (
            "spec.training.evaluation.every: Evaluation happens at the end only; there is something to "
            "evaluate on, and evaluation.every is not set."
        )
    ]
    sets = [{"name": "other", "every": {"steps": 10}}]
    assert said({"sources": sources, "sets": sets}) == []


@pytest.mark.acceptance("input-A-59")
@pytest.mark.capability("A-59")
def test_the_width_of_a_model_is_its_widest_layer_or_its_configuration_is_refused() -> None:
    assert hidden_size_of(SimpleNamespace(hidden_size=64, hidden_sizes=[128])) == 64
    assert hidden_size_of(SimpleNamespace(hidden_sizes=[32, 256, 128])) == 256
    with pytest.raises(ModelError, match="has neither hidden_size nor hidden_sizes"):
        hidden_size_of(SimpleNamespace())


def test_a_run_directory_is_probed_and_left_unchanged(tmp_path: Path) -> None:
    finding = only(
        check_run_directory(
            tmp_path / "runs" / "a", checkpoint_bytes(FACTS, training()), keep=3
        )
    )
    assert finding.level == "ok"
    assert list((tmp_path / "runs" / "a").iterdir()) == []


def test_a_run_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = only(check_run_directory(tmp_path / "file" / "run", None, keep=3))
    assert finding.level == "error" and str(tmp_path / "file" / "run") in str(
        finding.problem
    )


def test_too_little_space_for_one_checkpoint_is_an_error_and_for_all_kept_ones_a_warning(
    tmp_path: Path,
) -> None:
    from evergrad_trainer.base.machine import free_bytes

    free = free_bytes(tmp_path)
    assert only(check_run_directory(tmp_path, free, keep=3)).level == "error"
    finding = only(check_run_directory(tmp_path, free // 3, keep=20))
    assert finding.level == "warning" and "Lower checkpoint.keep" in str(finding.problem)


def findings_of_script(
    folder: Path, *command: str, machine: Machine = MACHINE, num_workers: int = 2
) -> list[tuple[str, str]]:
    run = parse_run(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "mine"},
            "spec": {"nodes": {"min": 1, "max": 3}, "script": {"command": list(command)}},
        }
    )
    examination = examine(
        run,
        base_directory=folder,
        run_directory=folder / "run",
        machine=machine,
        num_workers=num_workers,
    )
    assert examination.plan is None
    return [(finding.level, str(finding.problem)) for finding in examination.findings]


def test_the_program_and_the_workers_of_a_script_are_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert findings_of_script(tmp_path, "train.py") == [
        ("ok", "spec.script.command: the file train.py is there."),
        ("ok", "spec.nodes: 2 to 6 workers in all, 2 a node."),
    ]
    (error, _) = findings_of_script(tmp_path, "missing.py")
    assert error[0] == "error" and "missing.py: does not exist" in error[1]
    (tmp_path / "run").rmdir()
    (tmp_path / "run").touch()
    assert [level for level, _ in findings_of_script(tmp_path, "train.py")] == [
        "ok",
        "ok",
        "error",
    ]


def test_a_module_that_is_not_found_is_a_warning_because_import_hooks_may_provide_it(
    tmp_path: Path,
) -> None:
    assert findings_of_script(tmp_path, "-m", "nothing.here")[0] == (
        "warning",
        (
            "spec.script.command[1]: the module 'nothing.here' was not found; it is neither in "
            "the working directory nor on this "
            "interpreter's path. Check its name and workingDirectory, or install it."
        ),
    )


def test_more_script_workers_than_accelerators_give_a_warning(tmp_path: Path) -> None:
    one = replace(MACHINE, num_accelerators=1)
    assert findings_of_script(tmp_path, "sh", machine=one)[1][0] == "warning"
    assert findings_of_script(tmp_path, "sh", machine=one, num_workers=1)[1][0] == "ok"


def test_shards_are_split_over_the_whole_world_and_no_process_holds_the_whole_model() -> (
    None
):
    """16 bytes a parameter shared by 64 processes, on devices that do not hold the 4 bytes of the whole
    weights."""
    facts = replace(FACTS, parameters=10**9, hidden_size=1024, num_layers=32)
    sharded = training(runtime={"parallelism": "fsdp2", "precision": "fp32"})
    device = replace(MACHINE, num_accelerators=8, accelerator_memory_bytes=3 * 10**9)
    assert (
        only(check_memory(sharded, facts, device, num_workers=8, world_size=64)).level
        == "ok"
    )
    assert (
        only(check_memory(sharded, facts, device, num_workers=2, world_size=2)).level
        == "error"
    )


def test_insufficient_memory_is_reported_with_its_parts_and_the_largest_model_that_fits() -> (
    None
):
    facts = replace(FACTS, parameters=10**9, hidden_size=2048, num_layers=16)
    device = replace(MACHINE, num_accelerators=1, accelerator_memory_bytes=10**10)
    text = str(
        only(check_memory(training(), facts, device, num_workers=1, world_size=1)).problem
    )
    named = int(
        re.search(
            r"in this plan about ([\d,]+)M "
            r"parameters would fit",
            text,
        )[1].replace(",", "")
    )  # type: ignore[index]
    assert "(state 16.8 GiB, " in text and 300 < named < 600
    tiny = replace(device, accelerator_memory_bytes=10**6)
    refused = str(
        only(check_memory(training(), facts, tiny, num_workers=1, world_size=1)).problem
    )
    # No micro-batch is small enough for a state that does not fit.
    assert "no model fits. Use runtime.activationCheckpointing" in refused


@pytest.mark.capability("A-23")
def test_offloaded_activations_must_fit_the_host_of_an_accelerator() -> None:
    facts = replace(FACTS, parameters=10**9, hidden_size=2048, num_layers=16)
    device = replace(MACHINE, num_accelerators=2, accelerator_memory_bytes=10**11)
    plan = training(runtime={"activationCheckpointing": "offload"})

    def check(machine: Machine) -> tuple[str, str]:
        first, _ = check_memory(plan, facts, machine, num_workers=2, world_size=2)
        return first.level, str(first.problem)

    level, text = check(replace(device, memory_bytes=10**10))
    field = "spec.training.runtime.activationCheckpointing"
    assert level == "ok" and text.startswith(f"{field}: offload leaves about ")
    level, text = check(replace(device, memory_bytes=10**4))
    assert level == "error" and "9.77 KiB are there" in text and "Write full" in text
    # An input that stays in place saves nothing, and trains nevertheless.
    level, text = check(replace(MACHINE, memory_bytes=10**11))
    assert level == "warning" and "no other memory than the host's" in text


@pytest.mark.acceptance("input-T-42")
@pytest.mark.acceptance("number-T-41")
@pytest.mark.capability("T-21", "T-41", "T-42")
def test_the_largest_micro_batch_that_fits_is_named_and_leaves_one_to_each_worker() -> None:
    facts = replace(FACTS, hidden_size=1024, num_layers=16)
    device = replace(MACHINE, num_accelerators=1, accelerator_memory_bytes=16 * 10**9)

    def check(micro: int, **options: Any) -> Finding:
        plan = training(
            batching={"globalBatchSize": 48, "microBatchSize": micro},
            data={
                "sources": [{"name": "docs", "path": "docs.jsonl"}],
                "sequenceLength": 2048,
            },
        )
        options = {"num_workers": 1, "world_size": 1, **options}
        return only(check_memory(plan, facts, device, **options))

    fine = check(1)
    named = int(
        re.search(r"with a microBatchSize of up to (\d+), too", str(fine.problem))[1]
    )  # type: ignore[index]
    assert fine.level == "ok" and 1 < named < 48 and 48 % named == 0
    # It is the bound: the next divisor is refused, and names it.
    assert check(named).level == "ok" and "up to" not in str(check(named).problem)
    beyond = min(one for one in (2, 3, 4, 6, 8, 12, 16, 24, 48) if one > named)
    refused = check(beyond)
    assert refused.level == "error"
    assert f"Lower batching.microBatchSize to {named}, or use" in str(refused.problem)
    # Each of 24 workers has a micro-batch of 2 samples at most.
    assert "up to 2, too" in str(check(1, most_workers=24).problem)
    assert "up to" not in str(check(1, most_workers=48).problem)


def traps(machine: Machine = MACHINE, **changes: Any) -> list[str]:
    return [
        problem.path for problem in find_traps(training(**changes), None, machine=machine)
    ]


def test_a_chunked_loss_is_refused_for_a_model_whose_head_is_not_a_linear_layer() -> None:
    chunked = training(runtime={"lossChunk": 512})
    for name, paths in {"gemma2": ["spec.training.runtime.lossChunk"], "llama": []}.items():
        plan: Any = SimpleNamespace(
            name=name, config=SimpleNamespace(get_text_config=object)
        )
        assert [
            problem.path for problem in find_traps(chunked, plan, machine=MACHINE)
        ] == paths


def test_two_stages_need_a_model_with_chunkable_logits() -> None:
    staged = training(
        recipe="two_stage_kl",
        twoStageKl={"stages": [{"tokens": 1}, {}]},
        horizon={"steps": 9},
    )
    for name, found in {"gemma2": ["spec.training.model"], "llama": []}.items():
        plan: Any = SimpleNamespace(
            name=name, config=SimpleNamespace(get_text_config=object)
        )
        assert [one.path for one in find_traps(staged, plan, machine=MACHINE)] == found


@pytest.mark.capability("A-5", "A-57")
def test_a_pretrained_model_is_not_trained_on_bytes_by_default() -> None:
    assert traps(model={"path": "pretrained"}) == ["spec.training.tokenizer"]
    assert traps(model={"path": "pretrained"}, tokenizer={"type": "byte"}) == []
    assert (
        traps(
            model={"path": "pretrained"},
            tokenizer={"type": "transformers", "path": "pretrained"},
        )
        == []
    )


def test_moments_in_bf16_that_would_never_decrease_are_refused() -> None:
    """Like the moments: 1.0 in bf16, times a decay, is 1.0 again exactly for the refused decays."""
    for decay in (0.9, 0.95, 0.99, 0.995, 0.997, 0.999, 0.9999):
        moment = torch.ones((), dtype=torch.bfloat16)
        is_frozen = any(
            bool(value * decay == value)
            for value in (moment * (1 + step / 128) for step in range(128))
        )
        optimizer = {"learningRate": 1e-3, "betas": [0.9, decay]}
        found = traps(runtime={"precision": "bf16"}, optimizer=optimizer)
        assert (found == ["spec.training.optimizer.betas"]) == is_frozen, decay
        assert traps(runtime={"precision": "bf16-autocast"}, optimizer=optimizer) == []


def test_a_momentum_in_bf16_that_would_never_decrease_is_refused() -> None:
    slow = {"type": "sgd", "learningRate": 1e-3, "momentum": 0.999}
    found = traps(runtime={"precision": "bf16"}, optimizer=slow)
    assert found == ["spec.training.optimizer.momentum"]
    lion = {"type": "lion", "learningRate": 1e-3}
    assert traps(runtime={"precision": "bf16"}, optimizer=lion) == []


def test_groups_without_a_matching_parameter_are_found_before_the_preparation() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    names = ["*.bias", "lm_head.weight", "model.embed_token.weight"]
    groups = [{"parameters": names, "weightDecay": 0}]
    optimizer = {"learningRate": 1e-3, "groups": groups}
    plan = plan_model(
        Model.model_validate({"config": config}), base_directory=Path(), vocab_size=257
    )
    found = list(find_traps(training(optimizer=optimizer), plan, machine=MACHINE))
    first, second = map(str, found)
    assert "groups[0].parameters[0]: '*.bias' names no parameter that is trained" in first
    assert "Did you mean model.embed_tokens.weight?" in second


def test_exact_sums_on_an_accelerator_need_deterministic_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, exact = replace(MACHINE, num_accelerators=1), {"elastic": "exact"}
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert traps(machine, reproducibility=exact) == [
        "spec.training.reproducibility.elastic"
    ]
    assert traps(machine, reproducibility=exact, runtime={"device": "cpu"}) == []
    assert traps(reproducibility=exact) == [] and traps(machine) == []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert traps(machine, reproducibility=exact) == []


def test_a_run_that_has_started_with_a_trap_gets_a_warning_and_continues(
    tmp_path: Path,
) -> None:
    """Its recipe cannot be changed any more."""
    raw = {
        "optimizer": {"learningRate": 1e-3, "betas": [0.9, 0.999]},
        "runtime": {"precision": "bf16"},
    }
    (tmp_path / "docs.jsonl").write_text('{"text": "x"}\n')
    run = parse_run(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "tiny"},
            "spec": {
                "training": training(**raw).model_dump(
                    by_alias=True, exclude_unset=True, mode="json"
                )
            },
        }
    )

    def level(*, begun: bool) -> str:
        directory = tmp_path / "run"
        directory.mkdir(exist_ok=True)
        if begun:
            (directory / "run.json").touch()
        found = examine(
            run,
            base_directory=tmp_path,
            run_directory=directory,
            machine=MACHINE,
            num_workers=1,
        ).findings
        return only(
            finding
            for finding in found
            if finding.problem.path == "spec.training.optimizer.betas"
        ).level

    assert [level(begun=False), level(begun=True)] == ["error", "warning"]


def test_the_workers_of_all_nodes_need_slots_although_each_node_counts_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "x"}\n')
    spec = {
        "training": training().model_dump(by_alias=True, exclude_unset=True, mode="json")
    }
    run = parse_run(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "tiny"},
            "spec": spec,
        }
    )

    def told(most: int) -> Finding:
        places = {"base_directory": tmp_path, "run_directory": tmp_path / "run"}
        found = examine(
            run,
            **places,
            machine=MACHINE,
            num_workers=2,
            world_sizes=range(2, 2 * most + 1, 2),
        ).findings
        return only(
            finding for finding in found if finding.problem.path == "spec.workersPerNode"
        )

    assert told(2).level == "ok" and told(3).level == "error"
    assert "6 workers cannot share 4 slots a step" in str(told(3).problem)


def test_preflight_reports_ineffective_settings_if_the_steps_are_known_without_data(
    tmp_path: Path,
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "x"}\n')

    def told(horizon: dict[str, int]) -> list[str]:
        late = training(checkpoint={"every": {"steps": 101}}, horizon=horizon)
        spec = {"training": late.model_dump(by_alias=True, exclude_unset=True, mode="json")}
        run = parse_run(
            {
                "apiVersion": "evergrad.dev/v1alpha1",
                "kind": "TrainingRun",
                "metadata": {"name": "tiny"},
                "spec": spec,
            }
        )
        places = {"base_directory": tmp_path, "run_directory": tmp_path / "run"}
        found = examine(run, **places, machine=MACHINE, num_workers=1).findings
        return [one.level for one in found if "checkpoint.every" in one.problem.path]

    assert told({"steps": 100}) == ["warning"]
    assert told({"steps": 101}) == told({"epochs": 1}) == []

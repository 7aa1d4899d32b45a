"""Option names of other trainers: each is refused with its replacement."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from evergrad_cli.main import main
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import find_field, walk_fields
from evergrad_manifest.model.spelling import fold
from evergrad_manifest.reading.foreign import FOREIGN
from evergrad_manifest.reading.foreign_values import FOREIGN_VALUES
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.reading.problems import problems_of

Refuse = Callable[[str], tuple[Problem, ...]]
BASE = Path(__file__).parent / "base_manifest.yaml"


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Return the problems of a manifest with an override. `evergrad run` reports the same problems, exits
    with 64, and does not change the run directory."""

    def problems(override: str) -> tuple[Problem, ...]:
        with pytest.raises(ConfigurationError) as refused:
            load_manifest(BASE, overrides=[override])
        directory = tmp_path / "run"
        directory.mkdir(exist_ok=True)
        (directory / "run.json").write_text("{}")
        code = main(
            ["run", str(BASE), "--run-directory", str(directory), "--set", override]
        )
        said = capsys.readouterr()
        assert (code, said.out) == (64, "")
        assert said.err.splitlines() == [f"error: {one}" for one in refused.value.problems]
        assert [one.name for one in directory.iterdir()] == ["run.json"]
        assert (directory / "run.json").read_text() == "{}"
        return refused.value.problems

    return problems


_OF_MICRO = (
    " (--set); it cuts a step into the slots whose sums make the gradient, and one that each machine found out "
    "for itself would make a run another one on each. Write the number that `evergrad preflight` names as the "
    "largest one that fits."
)


def assert_refused_with(refuse: Refuse, key: str, said: str) -> None:
    path = f"spec.training.{key}"
    [problem] = [one for one in refuse(f"{path}=2") if one.path == path]
    assert "is an option of other trainers" in str(problem)
    assert said in str(problem)


@pytest.mark.acceptance("8d-8e", "input-4e-10", "input-5e-12")
@pytest.mark.capability("A-26", "A-31", "A-52", "A-60", "A-81", "G-X3", "G-X9")
@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "spec.training.deepspeed",
            "is an option of other trainers (--set); it belongs to a vendor's engine. Write spec.training.runtime.",
        ),
        (
            "spec.training.runtime.sequence_parallel_size",
            (
                "takes no mask, which packed documents need; a sequence that does not fit is made to fit by "
                "recomputation. Write spec.training.runtime.activationCheckpointing and "
                "spec.training.runtime.lossChunk."
            ),
        ),
        ("spec.training.max_steps", "Write spec.training.horizon.steps."),
        (
            "spec.training.batching.gradientAccumulationSteps",
            "accumulation follows from the two sizes and the number of processes",
        ),
        (
            "spec.training.data.shuffle_buffer_size",
            "which a buffer can only approach. Remove it.",
        ),
        ("spec.training.warmup-steps", "Write spec.training.schedule.warmup."),
        (
            "spec.training.model.trust_remote_code",
            "code runs only where the file names it, and none is downloaded",
        ),
        ("spec.training.data.pack_samples", "Write spec.training.data.packing."),
        (
            "spec.training.mask_inputs",
            "completions alone are learned unless everything is asked for. Write spec.training.rows.learn.",
        ),
        (
            "spec.training.rows.response_template",
            "a row says by its fields where its completion",
        ),
        ("spec.training.ref_model", "Write spec.training.preference.reference."),
        (
            "spec.training.data.max_prompt_length",
            "the prompt of a pair is the same in both of its rows. Write spec.training.rows.tooLong.",
        ),
        ("spec.launcher", "no other scheduler is used. Remove it."),
        (
            "spec.training.checkpoint.resume_from",
            "with `load: everything`. Write spec.training.initFrom.path.",
        ),
        ("spec.training.load_checkpoint_strategy", "Write spec.training.initFrom.load."),
        (
            "spec.training.checkpoint.last_save_freq",
            "`keepEvery` of those that are never removed. Write spec.training.checkpoint.every and",
        ),
        (
            "spec.training.checkpoint_engines",
            "`evergrad checkpoint export` makes a transformers directory of any of them",
        ),
        ("spec.training.checkpoint.save_end_of_training", "saved at the end in any case"),
        ("spec.training.exit_iteration_this_run", "`evergrad run --stop-after-steps`"),
        ("spec.training.data.stop_mode", "Write spec.training.horizon.exhausted."),
        (
            "spec.training.activation_checkpoint_cpu_offload",
            "recomputed blocks in host memory. Write spec.training.runtime.activationCheckpointing.",
        ),
        ("spec.training.data.sample_ratio", "Write spec.training.data.sources[].samples."),
        ("spec.training.data.sample_seed", "Write spec.training.reproducibility.dataSeed."),
        # Names of the migration pages that are fields here, in another section or spelling.
        (
            "spec.training.min_iterations",
            "Write spec.training.horizon.steps and spec.training.horizon.epochs.",
        ),
        (
            "spec.training.micro_batch_size",
            "it is written `microBatchSize` here, and belongs in spec.training.batching.",
        ),
        ("spec.training.loss_log_interval", "Write spec.training.logging.every.steps."),
        (
            "spec.training.overfit_first_batch",
            "it is written `overfitFirstBatch` here, and belongs in spec.training.data.",
        ),
        (
            "spec.training.learning_rate",
            "it is written `learningRate` here, and belongs in",
        ),
        ("spec.training.training_data_dirs", "Write spec.training.data.sources[].path."),
        ("spec.training.valid_data_dir", "spec.training.evaluation.sources[].path"),
        ("spec.training.eval_datasets", "spec.training.evaluation.sources[].path"),
        ("spec.training.model.name_or_path", "Write spec.training.model.path."),
    ],
)
def test_an_option_of_other_trainers_is_refused_with_its_replacement(
    refuse: Refuse, key: str, said: str
) -> None:
    [problem] = [one for one in refuse(f"{key}=2") if one.path == key]
    assert said in str(problem)


@pytest.mark.acceptance("input-A-18")
@pytest.mark.capability(
    "A-18", "A-19", "A-22", "A-24", "A-83", "C-48", "C-61", "C-63", "C-64"
)
@pytest.mark.capability(
    "A-7", "A-84", "A-29", "A-34", "A-47", "A-70", "O-23", "O-26", "O-72", "O-79", "T-43"
)
@pytest.mark.capability("O-41", "O-46", "O-70", "O-71", "O-75")
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("sequence_parallel_size", "runtime.activationCheckpointing"),
        (
            "tensor_parallel_size",
            "(`base_model_tp_plan`) cut each layer for one number of processes",
        ),
        ("tp_size", "fsdp2. Write spec.training.runtime.parallelism."),
        (
            "pipeline_parallel_size",
            "(`base_model_pp_plan`) and torch's schedules give each process",
        ),
        ("expert_parallel_size", "experts are sharded with the rest of the model by fsdp2"),
        ("enable_routing_replay", "and so the same routes. Write spec.training.runtime"),
        ("tiled_mlp_compute", "cuts no model's layers up"),
        ("launcher", "and no other scheduler is used. Remove it."),
        ("python_profile", "Write spec.training.logging.profile."),
        ("grad_accumulation_scheduler", "so that its samples follow from its number"),
        ("separate_perplexity", "is an evaluator of a task of your own"),
        (
            "rejection_sampling",
            "each round is a run of its own that begins with the weights",
        ),
        ("oracle", "a search that calls a model is a program around its runs"),
        (
            "data.synthetic_data",
            "what a model generates is a file by then. Write spec.training.data",
        ),
        ("model_transforms", "each of them is a field there, and their order is fixed"),
        ("mem_profiler", "from step 1 at the earliest"),
        ("eval_log_iter_interval", "each evaluation is written down"),
        (
            "print_output_ranks",
            "each rank writes a file of its own with all lines from INFO on",
        ),
        ("eval_amp", "computes as the training does, so that both losses can be compared"),
        (
            "metric_groups",
            "nothing is kept from one step to the next. Write spec.training.recipe.",
        ),
        ("log_gpu_memory", "where the vendor's exporter (DCGM) has them"),
        ("callbacks", "nothing replaces other values silently"),
        ("loss_reduction", "each token of a step counts the same; the mean of the means"),
    ],
)
def test_an_unsupported_option_is_refused_with_its_reason(
    refuse: Refuse, key: str, said: str
) -> None:
    path = f"spec.training.{key}"
    [problem] = [one for one in refuse(f"{path}=2") if one.path == path]
    assert said in str(problem)


@pytest.mark.capability("C-28", "O-77", "O-78", "A-41", "A-42", "A-44", "A-55")
@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "valid_batch_size",
            "`evergrad evaluate --micro-batch-size` has a size of its own",
        ),
        ("log_rotation", "trackers read metrics.jsonl from its beginning"),
        (
            "data.hub_dataset",
            "save a data set of the hub as JSON Lines or Parquet. Write spec",
        ),
        (
            "data.flat_batch",
            "one to a sample by the file. Write spec.training.data.packing.",
        ),
        (
            "checkpoint.type",
            "`evergrad checkpoint export` makes a transformers directory of any of them",
        ),
        (
            "checkpoint.enabled",
            "would begin again at step 0. Write spec.training.checkpoint.every.",
        ),
        (
            "checkpoint.output_dir",
            "`evergrad run --run-directory` sets it. Write spec.storage",
        ),
        ("checkpoint.auto_resume", "a run resumes by itself"),
        ("checkpoint.save_every_n_epochs", "sources repeat each in its own epochs"),
        ("model.type", "Write spec.training.model.config and spec.training.model.path."),
        ("data.eval_sources", "Write spec.training.evaluation.sources."),
        ("data.train_eval_split", "Write spec.training.data.heldOut."),
        ("data.cache_dir", "Write spec.training.data.preparedDirectory."),
        ("data.cache_fs_type", "one rename publishes prepared data"),
        (
            "data.fail_on_missing_cache",
            "`evergrad run --require-prepared` prepares nothing",
        ),
        ("data.div_length", "all samples have one length"),
        ("data.pad_to", "Write spec.training.data.sequenceLength."),
        (
            "data.drop_last",
            "behind the last samples of an epoch come the first of the next",
        ),
        ("data.fuse_positions_prob", "positions start again in each row"),
        ("data.repeat_to_pack_max_length", "would be learned more often than others"),
        ("data.ignore_empty_think", "and can leave thoughts out"),
    ],
)
def test_a_part_of_a_section_of_another_trainer_is_refused_with_its_reason(
    refuse: Refuse, key: str, said: str
) -> None:
    assert_refused_with(refuse, key, said)


def test_a_foreign_name_of_one_section_is_an_unknown_key_elsewhere() -> None:
    path = "spec.training.data.enabled"
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=[f"{path}=true"])
    [problem] = [one for one in refused.value.problems if one.path == path]
    assert "unknown key" in str(problem)


@pytest.mark.capability(
    "G-X22", "G-X28", "G-X29", "G-X30", "G-X31", "G-X36", "G-X37", "G-X39"
)
@pytest.mark.capability("O-73")
@pytest.mark.capability("T-X2", "T-X3", "T-X4", "T-X5", "T-X12")
@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "ppo_config",
            "generates between steps, and the data of a run are fixed before its first",
        ),
        ("grpo_config", "from pairs that are there. Write spec.training.recipe."),
        (
            "rollout_steps",
            "a separate program does it, or an evaluator of a task of your own",
        ),
        ("cem_iterations", "a rollout and a plan use a model that has been trained"),
        ("registry", "there is no table to enter oneself in, and so nothing entered twice"),
        ("optimizer.class_path", "are module:attr of a file next to it"),
        ("attestation", "a signature needs a key, and a run has none"),
        (
            "twoStageKl.fade",
            "weights that move with the step would need the steps before it",
        ),
        (
            "twoStageKl.snapshot_stages",
            "there is one boundary, and the reference is the model there",
        ),
        ("plot_intermediates", "what a model computes inside is not a metric"),
        ("runtime.no_require_accelerator", "Write spec.training.runtime.device."),
        ("runtime.min_cuda_vram_gb", "preflight refuses a device that has less"),
        ("package_release_run", "summary.json has size and SHA-256 of each of its records"),
        ("preflight_output", "each start writes preflight.json into the run directory"),
        ("allow_fixture", "a run has no mode in which its data counts for less"),
        ("edit_type_weights", "Write spec.training.latentEdit.mixture[].family and"),
        ("multi_edit_fraction", "items of one family have the same number of edits"),
    ],
)
def test_options_of_other_systems_for_run_management_are_refused_with_a_reason(
    refuse: Refuse, key: str, said: str
) -> None:
    assert_refused_with(refuse, key, said)


@pytest.mark.capability("T-X1")
def test_a_third_stage_is_refused_with_its_reason(refuse: Refuse) -> None:
    path = "spec.training.twoStageKl.stages"
    [problem] = [
        one for one in refuse(f"{path}=[{{tokens: 1M}}, {{}}, {{}}]") if one.path == path
    ]
    assert str(problem) == (
        f"{path}: the list has more than 2 items (--set); there is one boundary, whose model is the reference "
        "of all that follows. Write two stages; for a third, begin another run with the weights of this one "
        "(initFrom)."
    )


@pytest.mark.capability("T-7")
def test_a_custom_optimizer_is_refused_with_its_reason() -> None:
    path = "spec.training.optimizer.type"
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=[f"{path}=mine:Sophia"])
    [problem] = refused.value.problems
    assert str(problem) == (
        f"{path}: 'mine:Sophia' is not one of adamw, lion, sgd, muon, adafactor (--set); an optimizer's state "
        "is saved, given to newcomers and cut in parts by its names, and its update has to give the same bits "
        "on any number of processes: both are shown for those that have a name. Write one of them; `groups` "
        "has rates and decays for parts of the model."
    )
    # A value that looks like a name is compared with the existing names.
    with pytest.raises(ConfigurationError, match="Did you mean adamw"):
        load_manifest(BASE, overrides=[f"{path}=adamw_torch"])


@pytest.mark.acceptance("input-A-50")
@pytest.mark.capability("A-50")
def test_auto_length_from_the_model_is_refused_and_the_number_of_the_model_is_named(
    refuse: Refuse, tmp_path: Path
) -> None:
    path = "spec.training.data.sequenceLength"
    why = "it decides which tokens are a sample, and must not change where the model's file does"
    [problem] = refuse(f"{path}=auto")
    assert f"{path}: 'auto' is not a number (--set); {why}. Write the number" in str(
        problem
    )

    # If the field is omitted, the error shows what to write, if the file contains it.
    text = BASE.read_text("utf-8").replace("      sequenceLength: 256\n", "")
    file = tmp_path / "run.yaml"
    file.write_text(
        text.replace("llama,", "llama, max_position_embeddings: 2048,"), "utf-8"
    )
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(file)
    [problem] = [one for one in refused.value.problems if one.path == path]
    assert f"it has no default: {why}. Add `sequenceLength`" in str(problem)
    assert "at most its `max_position_embeddings`, which is 2048)" in str(problem)


@pytest.mark.capability("T-47")
@pytest.mark.parametrize("metric", ["train/loss", "loss"])
def test_the_loss_of_a_step_cannot_choose_the_best_checkpoint(metric: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=[f"spec.training.checkpoint.best.metric={metric}"])
    [problem] = refused.value.problems
    assert str(problem) == (
        f"spec.training.checkpoint.best.metric: '{metric}' is not a metric of this run (--set); the loss of a "
        "step is that of its own samples alone, so that chance would choose. Known here: heldOut/loss, "
        "heldOut/perplexity."
    )


@pytest.mark.acceptance("input-T-42")
@pytest.mark.capability("G-21", "O-79", "T-21", "T-42", "T-X4", "T-X5", "G-X11")
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "spec.training.batching.microBatchSize",
            "auto",
            f"'auto' is not a number{_OF_MICRO}",
        ),
        ("spec.training.batching.microBatchSize", "-1", f"-1 is too small{_OF_MICRO}"),
        (
            "spec.training.runtime.device",
            "mps",
            (
                "'mps' is not one of auto, cpu, cuda (--set); torch.distributed exchanges no tensors of "
                "Apple's GPUs, and a run must be able to grow beyond one process. Write cpu on such a "
                "machine, or leave it out."
            ),
        ),
        *(
            (
                "spec.training.recipe",
                recipe,
                (
                    f"'{recipe}' is not a recipe (--set); it learns from what the model itself generates "
                    "between steps, and the data of a run are fixed before its first step. Write preference, "
                    "which learns from pairs that are there, or module:attr of a task of your own."
                ),
            )
            for recipe in ("ppo", "grpo")
        ),
        (
            "spec.training.optimizer.type",
            "adamw_8bit",
            (
                "'adamw_8bit' is not one of adamw, lion, sgd, muon, adafactor (--set); such moments have a "
                "scale for each block of a tensor, and the blocks follow from how it is cut: another number "
                "of processes would give other bits; their kernels are in packages other than torch. Write "
                "adafactor, which keeps less, or set runtime.precision: bf16, whose moments are bf16."
            ),
        ),
        (
            "spec.training.runtime.precision",
            "FP8",
            (
                "'FP8' is not one of fp32, bf16-autocast, fp16-autocast, bf16 (--set); training in fp8 needs kernels of a package other than torch, which the trainer does not have. Write "
                "bf16-autocast."
            ),
        ),
    ],
)
def test_a_value_of_other_trainers_is_refused_with_its_reason(
    refuse: Refuse, path: str, value: str, said: str
) -> None:
    assert [str(one) for one in refuse(f"{path}={value}")] == [f"{path}: {said}"]


def test_each_foreign_value_belongs_to_an_existing_field() -> None:
    paths = [f".{field.path}" for field in walk_fields(TrainingRun)]
    for one in FOREIGN_VALUES:
        assert any(path.endswith(f".{one.key}") for path in paths), one.key
        assert one.why
        assert one.remedy


def test_each_foreign_name_refers_to_existing_fields_and_is_listed_once() -> None:
    for one in FOREIGN:
        assert one.fields or one.why, one.names
        for field in one.fields:
            assert find_field(TrainingRun, tuple(field.replace("[]", "").split("."))), field
    names = Counter(fold(name) for one in FOREIGN for name in one.names)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_foreign_name_is_an_evergrad_field() -> None:
    own = {fold(field.key) for field in walk_fields(TrainingRun)}
    assert own.isdisjoint(fold(name) for one in FOREIGN for name in one.names)


def test_an_unknown_option_of_a_user_task_is_compared_only_with_the_options_of_the_task() -> (
    None
):
    class Options(Section):
        strategies: int = 1
        """Number of strategies."""

    with pytest.raises(ValidationError) as refused:
        Options.model_validate({"strategy": 2})
    [problem] = problems_of(refused.value, {"strategy": 2}, root=Options)
    assert str(problem).startswith("strategy: unknown key; did you mean `strategies`?")

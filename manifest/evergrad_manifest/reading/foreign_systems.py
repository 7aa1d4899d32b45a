"""Options of other trainers that affect more than one field: how a model is divided between processes, and
tasks of other systems around a run. Each is refused with its reason."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Foreign:
    """An option of other trainers.

    ``fields``: the paths of the fields that replace it here. ``why``: how they differ from it, or why
    Evergrad has no such option. Without ``fields``, the remedy is to remove the option.
    """

    names: tuple[str, ...]
    fields: tuple[str, ...] = ()
    why: str = ""


_T: Final = "spec.training"

PARALLEL: Final = (
    Foreign(
        ("sequence_parallel_size", "context_parallel_size", "sp_size", "cp_size"),
        (f"{_T}.runtime.activationCheckpointing", f"{_T}.runtime.lossChunk"),
        "transformers has no plan that cuts sequences, and torch's (`context_parallel`) is experimental and "
        "takes no mask, which packed documents need; a sequence that does not fit is made to fit by "
        "recomputation",
    ),
    Foreign(
        ("tensor_parallel_size", "tp_size"),
        (f"{_T}.runtime.parallelism",),
        "transformers' plans (`base_model_tp_plan`) cut each layer for one number of processes, which sum "
        "inside of it: a step's bits would depend on that number, and a lost process would take a part of "
        "each layer with it; a model that does not fit is sharded by fsdp2",
    ),
    Foreign(
        ("pipeline_parallel_size", "pp_size"),
        (f"{_T}.runtime.parallelism",),
        "transformers' plans (`base_model_pp_plan`) and torch's schedules give each process layers of its "
        "own, which a lost one takes with it; a model that does not fit is sharded by fsdp2",
    ),
    Foreign(
        ("expert_parallel_size", "ep_size"),
        (f"{_T}.runtime.parallelism",),
        "transformers' plans (`base_model_ep_plan`) give each process experts of its own, which a lost one "
        "takes with it; experts are sharded with the rest of the model by fsdp2",
    ),
)
"""Other ways to divide a model. The plans of torch and transformers require a world that does not change."""

AROUND: Final = (
    Foreign(
        ("rejection_sampling", "num_rounds", "rs_config", "iterative_sft"),
        (f"{_T}.initFrom.path",),
        "the data of a run are fixed before its first step: each round is a run of its own that begins with "
        "the weights of the one before",
    ),
    Foreign(
        ("synthetic_data", "data_generation", "synth"),
        (f"{_T}.data.sources[].path",),
        "the data of a run are fixed before its first step: what a model generates is a file by then",
    ),
    Foreign(
        ("molecule_optimization", "oracle", "max_oracle_calls"),
        (f"{_T}.initFrom.path",),
        "a search that calls a model is a program around its runs",
    ),
    Foreign(
        ("separate_perplexity", "per_property_perplexity", "property_perplexity"),
        (f"{_T}.recipe",),
        "what is measured on spans of tokens is an evaluator of a task of your own",
    ),
    Foreign(
        (
            *("ppo", "ppo_config", "num_ppo_epochs", "cliprange", "value_model", "kl_coef"),
            *("grpo", "grpo_config", "num_generations", "reward_model", "reward_funcs"),
        ),
        (f"{_T}.recipe",),
        "PPO and GRPO learn from what the model itself generates between steps, and the data of a run are "
        "fixed before its first step; `preference` learns from pairs that are there",
    ),
    Foreign(
        (
            *("rollout", "rollout_steps", "rollout_length", "rollout_horizon"),
            *("planning", "planner", "cem", "cem_iterations", "cem_samples"),
        ),
        (f"{_T}.recipe",),
        "a rollout and a plan use a model that has been trained: a separate program does it, or an "
        "evaluator of a task of your own",
    ),
    Foreign(
        ("registry", "registries", "class_path"),
        (f"{_T}.recipe",),
        "parts have the names of the file, or are module:attr of a file next to it; there is no table to "
        "enter oneself in, and so nothing entered twice",
    ),
    Foreign(
        ("receipt", "receipts", "attestation", "sign_artifacts"),
        why="a signature needs a key, and a run has none; summary.json has size and SHA-256 of each record, "
        "which a program of yours signs",
    ),
    Foreign(
        ("fade", "mixture_fade", "fade_shape", "fade_tokens", "mixture_schedule"),
        (f"{_T}.twoStageKl.stages[].mixture",),
        "a stage has one mixture, from which the sample of each index follows; weights that move with the "
        "step would need the steps before it",
    ),
    Foreign(
        ("snapshot_stages", "snapshot_stage", "reference_stage"),
        (f"{_T}.twoStageKl.stages",),
        "there is one boundary, and the reference is the model there; for another reference, or a third "
        "stage, a run begins with the weights of the one before",
    ),
    Foreign(
        ("plot_intermediates", "log_plots", "plot_activations", "intermediates"),
        (f"{_T}.recipe",),
        (
            "the report plots metrics, and those of a task of your own too; what a model computes inside "
            "is not a metric, and compiled blocks do not keep it"
        ),
    ),
    Foreign(
        ("require_accelerator", "no_require_accelerator"),
        (f"{_T}.runtime.device",),
        "`cuda` needs one, and `auto` takes what is there",
    ),
    Foreign(
        ("min_cuda_vram_gb", "min_vram_gb"),
        (f"{_T}.runtime.device",),
        "what a run needs is estimated from its model and its batch, and preflight refuses a device that has "
        "less",
    ),
    Foreign(
        ("package_release_run", "release_package"),
        why="the run directory is what is handed on: summary.json has size and SHA-256 of each of its "
        "records, and report.md says what was trained",
    ),
    Foreign(
        ("preflight_output", "preflight_report"),
        why="each start writes preflight.json into the run directory, and `evergrad preflight --json` prints "
        "it",
    ),
    Foreign(
        ("allow_fixture", "fixture", "fixture_mode"),
        why="a run has no mode in which its data counts for less; its name and its snapshot show what it is",
    ),
    Foreign(
        ("edit_type_weights", "balanced_sampling", "edit_type_balance"),
        (f"{_T}.latentEdit.mixture[].family", f"{_T}.latentEdit.mixture[].count"),
        "each window has so many items of each family",
    ),
    Foreign(
        ("multi_edit_fraction", "multi_edit_prob"),
        (f"{_T}.latentEdit.mixture[].count", f"{_T}.latentEdit.mixture[].edits"),
        "items of one family have the same number of edits",
    ),
)
"""Tasks that other systems perform before, after or during the training of one model on existing data."""

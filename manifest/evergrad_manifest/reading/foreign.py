"""Names that options have in other trainers: what to write here instead, or why there is nothing to write.

Compared without case, dashes and underscores. A name that a section of ours has too is not looked up here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from evergrad_manifest.spelling import fold


@dataclass(frozen=True)
class Foreign:
    """An option of other trainers.

    ``fields``: the paths of the fields that do its duty here. ``why``: how they differ from it, or why
    Evergrad has no such option. Without ``fields`` the remedy is to remove it.
    """

    names: tuple[str, ...]
    fields: tuple[str, ...] = ()
    why: str = ""


_T: Final = "spec.training"
_ACCUMULATION: Final = (
    "accumulation follows from the two sizes and the number of processes, so that every world trains the "
    "same steps"
)
_SHARDING: Final = "it belongs to a vendor's engine"
_ONE_COPY: Final = "each process computes whole samples"

FOREIGN: Final = (
    # Engines and their parts.
    Foreign(
        ("deepspeed", "deepspeed_config", "zero", "zero_stage"), (f"{_T}.runtime",), _SHARDING
    ),
    Foreign(("fsdp", "fsdp_config", "strategy"), (f"{_T}.runtime.parallelism",)),
    Foreign(("dp_shard", "sharding_world_size", "hsdp_shard_size"), (f"{_T}.runtime.shards",)),
    Foreign(("ddp_timeout", "dist_timeout"), (f"{_T}.runtime.collectiveTimeoutSeconds",)),
    Foreign(("ddp_bucket_cap_mb", "bucket_cap_mb"), (f"{_T}.runtime.bucketSize",)),
    Foreign(
        ("sequence_parallel_size", "context_parallel_size", "sp_size", "cp_size"),
        (f"{_T}.runtime.activationCheckpointing", f"{_T}.runtime.lossChunk"),
        f"{_ONE_COPY}; a sequence that does not fit is made to fit by recomputation",
    ),
    Foreign(
        ("tensor_parallel_size", "tp_size", "pipeline_parallel_size", "pp_size"),
        (f"{_T}.runtime.parallelism",),
        f"{_ONE_COPY}; a model that does not fit is sharded by fsdp2",
    ),
    Foreign(
        ("expert_parallel_size", "ep_size"),
        (f"{_T}.runtime.parallelism",),
        "experts are sharded with the rest of the model by fsdp2",
    ),
    Foreign(
        ("arctic_moe", "enable_arctic_moe_custom_optimization"),
        why="the kernels belong to a vendor; transformers' own models of experts train",
    ),
    Foreign(
        ("launcher", "slurm_eval", "slurm"),
        why="the operator starts the pods of a run, and no other scheduler is used",
    ),
    # How long, how much, how often.
    Foreign(("max_steps", "train_iters", "iterations"), (f"{_T}.horizon.steps",)),
    Foreign(("num_train_epochs", "num_epochs", "max_epochs"), (f"{_T}.horizon.epochs",)),
    Foreign(("total_tokens", "token_budget"), (f"{_T}.horizon.tokens",)),
    Foreign(("scheduler_max_steps", "lr_decay_iters"), (f"{_T}.horizon.steps",)),
    Foreign(("exit_iteration", "exit_interval"), (f"{_T}.stop.afterStep",)),
    Foreign(
        ("per_device_train_batch_size", "train_batch_size", "per_device_batch_size"),
        (f"{_T}.batching.microBatchSize",),
    ),
    Foreign(
        (
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum_steps",
            "acc_steps",
        ),
        (f"{_T}.batching.globalBatchSize", f"{_T}.batching.microBatchSize"),
        _ACCUMULATION,
    ),
    Foreign(("save_steps", "save_freq", "save_interval"), (f"{_T}.checkpoint.every.steps",)),
    Foreign(("checkpoint_interval", "save_every_n_steps"), (f"{_T}.checkpoint.every.steps",)),
    Foreign(("save_total_limit", "keep_last_n"), (f"{_T}.checkpoint.keep",)),
    Foreign(("load_best_model_at_end", "metric_for_best_model"), (f"{_T}.checkpoint.best",)),
    Foreign(("eval_steps", "eval_freq", "eval_interval"), (f"{_T}.evaluation.every.steps",)),
    Foreign(("validation_interval", "val_check_interval"), (f"{_T}.evaluation.every.steps",)),
    Foreign(("logging_steps", "log_freq", "report_interval"), (f"{_T}.logging.every.steps",)),
    Foreign(
        ("report_to", "wandb", "wandb_project", "aim", "mlflow"), (f"{_T}.logging.trackers",)
    ),
    Foreign(("tensorboard_dir", "track", "track_dir"), (f"{_T}.logging.trackers",)),
    Foreign(("mem_profiler", "profile_dir", "mem_profiler_dir"), (f"{_T}.logging.profile",)),
    Foreign(("early_stopping", "early_stopping_patience"), (f"{_T}.stop.early",)),
    Foreign(("collapse_log_every_steps",), (f"{_T}.monitors",)),
    # Optimizer and schedule.
    Foreign(("max_lr", "lr_max"), (f"{_T}.optimizer.learningRate",)),
    Foreign(("adam_beta1", "adam_beta2", "beta1", "beta2"), (f"{_T}.optimizer.betas",)),
    Foreign(("adam_epsilon", "adam_eps"), (f"{_T}.optimizer.epsilon",)),
    Foreign(("max_grad_norm", "gradient_clip_val", "grad_clip"), (f"{_T}.optimizer.clipNorm",)),
    Foreign(("lr_scheduler_type", "lr_scheduler"), (f"{_T}.schedule.type",)),
    Foreign(("warmup_steps", "warmup_ratio", "warmup_pct"), (f"{_T}.schedule.warmup",)),
    Foreign(("decay_pct", "decay_fraction", "decay_ratio"), (f"{_T}.schedule.decay",)),
    Foreign(("min_lr", "min_lr_ratio", "lr_min"), (f"{_T}.schedule.minimumRatio",)),
    Foreign(("decay_type", "cooldown_type"), (f"{_T}.schedule.decayShape",)),
    Foreign(
        ("init_div_factor", "start_divisor", "div_factor"),
        (f"{_T}.schedule.startRatio",),
        "the ratio is one divided by it",
    ),
    Foreign(("lr_power", "poly_power"), (f"{_T}.schedule.power",)),
    Foreign(("optim", "optimizer_name", "optimizer_type"), (f"{_T}.optimizer.type",)),
    Foreign(
        ("param_groups", "optimizer_grouped_parameters", "no_decay", "no_weight_decay_params"),
        (f"{_T}.optimizer.groups",),
    ),
    # The machine.
    Foreign(("bf16", "fp16", "mixed_precision", "amp"), (f"{_T}.runtime.precision",)),
    Foreign(("tf32", "allow_tf32"), (f"{_T}.runtime.matmulPrecision",)),
    Foreign(("torch_compile", "use_compile"), (f"{_T}.runtime.compile",)),
    Foreign(("flash_attn", "attn_implementation"), (f"{_T}.runtime.attention",)),
    Foreign(
        ("gradient_checkpointing", "activation_checkpoint"),
        (f"{_T}.runtime.activationCheckpointing",),
    ),
    Foreign(("use_gpu", "no_cuda", "use_cpu", "accelerator"), (f"{_T}.runtime.device",)),
    # Data and model.
    Foreign(("from_pretrained", "model_name_or_path"), (f"{_T}.model.path",)),
    Foreign(("block_size", "max_seq_length", "seq_length"), (f"{_T}.data.sequenceLength",)),
    Foreign(("train_type", "trainer_type", "stage_type"), (f"{_T}.recipe",)),
    Foreign(
        ("pack_samples", "sample_packing", "use_packing", "neat_packing", "padding_free"),
        (f"{_T}.data.packing",),
    ),
    Foreign(("tokenizer_chat_template", "chat_template_path"), (f"{_T}.rows.chatTemplate",)),
    Foreign(
        (
            *("completion_only_loss", "assistant_only_loss", "train_on_inputs", "mask_inputs"),
            *("train_on_prompt", "mask_prompt", "loss_on_prompt"),
        ),
        (f"{_T}.rows.learn",),
        "completions alone are learned unless everything is asked for",
    ),
    Foreign(
        ("response_template", "instruction_template"),
        (f"{_T}.rows.promptField", f"{_T}.rows.completionField"),
        "a row says by its fields where its completion begins",
    ),
    Foreign(
        ("filter_samples", "truncation_mode", "excess_length_strategy"), (f"{_T}.rows.tooLong",)
    ),
    Foreign(("predict_with_generate", "do_generate"), (f"{_T}.evaluation.generation",)),
    Foreign(
        ("generation_max_length", "max_generated_tokens"),
        (f"{_T}.evaluation.generation.maxNewTokens",),
    ),
    Foreign(
        ("dataloader_num_workers", "dl_num_workers", "num_proc"),
        why="training reads prepared tokens in one background thread, and `evergrad prepare --workers` "
        "tokenises",
    ),
    Foreign(
        ("shuffle_buffer_size", "shuffle_buffer"),
        why="all samples of an epoch are permuted, which a buffer can only approach",
    ),
    Foreign(
        ("trust_remote_code",),
        (f"{_T}.recipe",),
        "code runs only where the file names it, and none is downloaded",
    ),
    # Control.
    Foreign(
        ("resume_from_checkpoint", "auto_resume"),
        (f"{_T}.initFrom.path",),
        "a run resumes by itself; weights of another run begin a fresh one",
    ),
    Foreign(("load_checkpoint", "init_checkpoint"), (f"{_T}.initFrom.path",)),
    Foreign(
        ("kill_switch_path", "kill_switch"),
        ("spec.suspend",),
        "a stop is asked for by SIGTERM, by Ctrl-C, or by suspending the run",
    ),
    Foreign(
        ("shuffle_seed", "sample_seed"),
        (f"{_T}.reproducibility.dataSeed",),
        "each purpose has random numbers of its own, keyed by the one seed",
    ),
    Foreign(("stopping_strategy", "stop_mode"), (f"{_T}.horizon.exhausted",)),
    Foreign(("sample_ratio", "sample_count"), (f"{_T}.data.sources[].samples",)),
    Foreign(("exp_name", "experiment_name", "run_name", "run_id"), ("metadata.name",)),
    Foreign(("checkpoints_root_dir", "output_path"), ("spec.storage.path",)),
)

_BY_NAME: Final[Mapping[str, Foreign]] = {
    fold(name): one for one in FOREIGN for name in one.names
}


def say_foreign(key: str) -> tuple[str, str, str] | None:
    """What is wrong with ``key``, why, and what to write: for a name of other trainers, else None."""
    foreign = _BY_NAME.get(fold(key))
    if foreign is None:
        return None
    remedy = f"Write {' and '.join(foreign.fields)}" if foreign.fields else "Remove it"
    return "is an option of other trainers", foreign.why, remedy

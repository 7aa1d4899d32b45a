"""Names of options in other trainers, each with the replacement here, or why there is none.

Names are compared without case, dashes and underscores. A name that one of our sections has, too, is not
looked up here. A name with a dot, such as ``checkpoint.type``, applies only in that section.
"""

from collections.abc import Mapping
from typing import Final

from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import fold
from evergrad_manifest.reading.foreign_systems import AROUND, PARALLEL, Foreign

_T: Final = "spec.training"
_ACCUMULATION: Final = (
    "accumulation follows from the two sizes and the number of processes, so that every world trains the "
    "same steps"
)
_SHARDING: Final = "it belongs to a vendor's engine"

FOREIGN: Final = (
    *PARALLEL,
    # Engines and their parts.
    Foreign(
        ("deepspeed", "deepspeed_config", "zero", "zero_stage"),
        (f"{_T}.runtime",),
        _SHARDING,
    ),
    Foreign(("fsdp", "fsdp_config", "strategy"), (f"{_T}.runtime.parallelism",)),
    Foreign(
        ("dp_shard", "sharding_world_size", "hsdp_shard_size"), (f"{_T}.runtime.shards",)
    ),
    Foreign(("ddp_timeout", "dist_timeout"), (f"{_T}.runtime.collectiveTimeoutSeconds",)),
    Foreign(("ddp_bucket_cap_mb", "bucket_cap_mb"), (f"{_T}.runtime.bucketSize",)),
    Foreign(
        ("arctic_moe", "enable_arctic_moe_custom_optimization"),
        why="the kernels belong to a vendor; transformers' own models of experts train",
    ),
    Foreign(
        ("enable_routing_replay", "routing_replay", "moe_routing_replay"),
        (f"{_T}.runtime.activationCheckpointing",),
        "what is recomputed has the inputs and random numbers of the first time, and so the same routes",
    ),
    Foreign(
        (
            *("activation_checkpoint_cpu_offload", "activation_offloading"),
            *("offload_activations", "cpu_checkpointing"),
        ),
        (f"{_T}.runtime.activationCheckpointing",),
        "its value `offload` leaves the inputs of recomputed blocks in host memory",
    ),
    Foreign(
        ("tiled_mlp_compute", "tiled_mlp"),
        (f"{_T}.runtime.activationCheckpointing", f"{_T}.runtime.lossChunk"),
        "memory is saved by recomputation, which cuts no model's layers up",
    ),
    Foreign(
        ("tiled_logits_compute", "use_liger_kernel", "fused_linear_cross_entropy"),
        (f"{_T}.runtime.lossChunk",),
    ),
    Foreign(
        ("offload_optimizer", "offload_param", "cpu_offload"),
        (f"{_T}.runtime.parallelism",),
        "what does not fit on one device is sharded by fsdp2",
    ),
    Foreign(
        ("model_transforms", "transforms"),
        (f"{_T}.runtime",),
        "each of them is a field there, and their order is fixed",
    ),
    Foreign(
        ("launcher", "slurm_eval", "slurm", "ray", "num_ray_workers"),
        why="the operator starts the pods of a run, and no other scheduler is used",
    ),
    # Length, amounts and intervals.
    Foreign(("max_steps", "train_iters", "iterations"), (f"{_T}.horizon.steps",)),
    Foreign(("num_train_epochs", "num_epochs", "max_epochs"), (f"{_T}.horizon.epochs",)),
    Foreign(
        ("min_iterations", "min_steps", "min_iters"),
        (f"{_T}.horizon.steps", f"{_T}.horizon.epochs"),
        "a run has one horizon; `evergrad prepare` prints the steps of an epoch, so that you can give the "
        "larger number of steps",
    ),
    Foreign(("total_tokens", "token_budget"), (f"{_T}.horizon.tokens",)),
    Foreign(("scheduler_max_steps", "lr_decay_iters"), (f"{_T}.horizon.steps",)),
    Foreign(("exit_iteration", "exit_interval"), (f"{_T}.stop.afterStep",)),
    Foreign(
        (
            *("per_device_train_batch_size", "train_batch_size", "per_device_batch_size"),
            "mbs",
        ),
        (f"{_T}.batching.microBatchSize",),
    ),
    Foreign(
        ("valid_batch_size", "eval_batch_size", "per_device_eval_batch_size"),
        (f"{_T}.batching.microBatchSize",),
        "a run evaluates in the shape of its training, which is compiled and fits; "
        "`evergrad evaluate --micro-batch-size` has a size of its own",
    ),
    Foreign(
        ("auto_find_batch_size", "auto_scale_batch_size", "find_executable_batch_size"),
        (f"{_T}.batching.microBatchSize",),
        (
            "the size of a micro-batch affects the bits of a step, so sizes that each machine finds for "
            "itself would give different runs of the same file"
        ),
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
    Foreign(
        (
            *("grad_accumulation_scheduler", "gradient_accumulation_scheduler"),
            *(
                "grad_accumulation_patience",
                "grad_accumulation_max",
                "dynamic_grad_accumulation",
            ),
            *("rampup_batch_size", "batch_size_rampup", "batch_size_schedule"),
        ),
        (f"{_T}.schedule",),
        (
            "a step has one size throughout, so that its samples follow from its number; a falling "
            "learning rate has the effect of a growing batch"
        ),
    ),
    Foreign(
        ("loss_reduction", "average_tokens_across_devices", "mean_of_means"),
        why="each token of a step counts the same; the mean of the means of micro-batches would give more "
        "weight to short rows, and another loss with another microBatchSize",
    ),
    Foreign(
        ("save_steps", "save_freq", "save_interval"), (f"{_T}.checkpoint.every.steps",)
    ),
    Foreign(
        ("checkpoint_interval", "save_every_n_steps"), (f"{_T}.checkpoint.every.steps",)
    ),
    Foreign(("save_total_limit", "keep_last_n"), (f"{_T}.checkpoint.keep",)),
    Foreign(
        ("load_best_model_at_end", "metric_for_best_model"), (f"{_T}.checkpoint.best",)
    ),
    Foreign(
        ("eval_steps", "eval_freq", "eval_interval"), (f"{_T}.evaluation.every.steps",)
    ),
    Foreign(
        ("validation_interval", "val_check_interval"), (f"{_T}.evaluation.every.steps",)
    ),
    Foreign(
        ("eval_log_iter_interval", "eval_log_interval"),
        (f"{_T}.evaluation.every.steps",),
        "each evaluation is written down, since each has taken its time",
    ),
    Foreign(
        ("log_level", "print_output_ranks", "file_output_ranks"),
        why="each rank writes a file of its own with all lines from INFO on, and the terminal has warnings",
    ),
    Foreign(
        (
            "logging_steps",
            "log_freq",
            "report_interval",
            "loss_log_interval",
            "log_interval",
        ),
        (f"{_T}.logging.every.steps",),
    ),
    Foreign(
        ("report_to", "wandb", "wandb_project", "aim", "mlflow"),
        (f"{_T}.logging.trackers",),
    ),
    Foreign(("tensorboard_dir", "track", "track_dir"), (f"{_T}.logging.trackers",)),
    Foreign(
        ("mem_profiler", "profile_dir", "mem_profiler_dir"),
        (f"{_T}.logging.profile",),
        "memory is recorded by steps, from step 1 at the earliest; what a start takes is in `evergrad "
        "preflight`",
    ),
    Foreign(
        ("python_profile", "python_profiler", "cprofile"),
        (f"{_T}.logging.profile",),
        "torch's profiler records the host, too, on a schedule and into the run directory",
    ),
    Foreign(("loggers", "logger"), (f"{_T}.logging",)),
    Foreign(
        ("log_rotation", "rotate_logs", "rotate_mb", "max_log_size", "max_file_size"),
        why="a resume, the report and trackers read metrics.jsonl from its beginning, and a million steps "
        "are some hundred megabytes",
    ),
    Foreign(("early_stopping", "early_stopping_patience"), (f"{_T}.stop.early",)),
    Foreign(("collapse_log_every_steps",), (f"{_T}.monitors",)),
    # Optimizer and schedule.
    Foreign(("overfit_batches", "overfit_one_batch"), (f"{_T}.data.overfitFirstBatch",)),
    Foreign(
        ("training_data_dirs", "train_data_dir", "data_dir", "train_file"),
        (f"{_T}.data.sources[].path",),
    ),
    Foreign(
        ("valid_data_dir", "validation_data_dir", "eval_datasets", "validation_file"),
        (f"{_T}.evaluation.sources[].path", f"{_T}.data.heldOut"),
    ),
    Foreign(("max_lr", "lr_max"), (f"{_T}.optimizer.learningRate",)),
    Foreign(("adam_beta1", "adam_beta2", "beta1", "beta2"), (f"{_T}.optimizer.betas",)),
    Foreign(("adam_epsilon", "adam_eps"), (f"{_T}.optimizer.epsilon",)),
    Foreign(
        ("max_grad_norm", "gradient_clip_val", "grad_clip"), (f"{_T}.optimizer.clipNorm",)
    ),
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
        (
            "param_groups",
            "optimizer_grouped_parameters",
            "no_decay",
            "no_weight_decay_params",
        ),
        (f"{_T}.optimizer.groups",),
    ),
    # Preference training.
    Foreign(("ref_model", "ref_model_name_or_path"), (f"{_T}.preference.reference",)),
    Foreign(
        ("dpo_beta", "dpo_loss_type"), (f"{_T}.preference.beta", f"{_T}.preference.loss")
    ),
    Foreign(
        ("max_prompt_length", "dpo_prompt_truncation_mode"),
        (f"{_T}.rows.tooLong",),
        "a row is cut at its end, so that the prompt of a pair is the same in both of its rows",
    ),
    Foreign(
        ("sync_ref_model", "ref_model_sync_steps", "precompute_ref_log_probs"),
        (f"{_T}.preference.reference",),
        "the reference stays as it is, and is computed in each step",
    ),
    *AROUND,
    # Choices that are made once for the whole run.
    Foreign(
        ("bf16_full_eval", "fp16_full_eval", "eval_precision", "eval_amp"),
        (f"{_T}.runtime.precision",),
        "an evaluation computes as the training does, so that both losses can be compared",
    ),
    Foreign(
        ("meters", "metric_groups", "metric_engine", "derived_metrics"),
        (f"{_T}.recipe",),
        "a task of your own has metrics, which are sums over a step, so that their means are the same on any "
        "number of processes; Evaluator.summarize derives others of those of a set, and nothing is kept from "
        "one step to the next",
    ),
    Foreign(
        ("log_gpu_memory", "skip_memory_metrics", "log_memory", "log_sm_utilization"),
        (f"{_T}.logging.profile",),
        "memory and busy units of a device are the node's, where the vendor's exporter (DCGM) has them; "
        "a trace has the memory of a step, and forward apart from backward",
    ),
    Foreign(
        ("callbacks", "hooks"),
        (f"{_T}.recipe",),
        (
            "a task of your own has observers, its own loss and its own data; nothing replaces other "
            "values silently"
        ),
    ),
    Foreign(("ema_decay", "use_ema", "ema_model", "ema_halflife"), (f"{_T}.ema.decay",)),
    # The machine.
    Foreign(("bf16", "fp16", "mixed_precision", "amp"), (f"{_T}.runtime.precision",)),
    Foreign(
        (
            "loss_scale",
            "init_scale",
            "initial_scale_power",
            "grad_scaler",
            "fp16_scale_window",
        ),
        (f"{_T}.runtime.precision",),
        "the scale of fp16-autocast begins at 65536 and finds its own value",
    ),
    Foreign(("tf32", "allow_tf32"), (f"{_T}.runtime.matmulPrecision",)),
    Foreign(("torch_compile", "use_compile"), (f"{_T}.runtime.compile",)),
    Foreign(("flash_attn", "attn_implementation"), (f"{_T}.runtime.attention",)),
    Foreign(
        ("gradient_checkpointing", "activation_checkpoint"),
        (f"{_T}.runtime.activationCheckpointing",),
    ),
    Foreign(("use_gpu", "no_cuda", "use_cpu", "accelerator"), (f"{_T}.runtime.device",)),
    # Data and model.
    Foreign(
        ("peft_config", "lora_config", "use_lora", "adapter", "use_peft"),
        (f"{_T}.model.lora",),
        "adapters are a part of the model",
    ),
    Foreign(("lora_r", "lora_rank"), (f"{_T}.model.lora.rank",)),
    Foreign(("lora_alpha",), (f"{_T}.model.lora.alpha",)),
    Foreign(("lora_dropout",), (f"{_T}.model.lora.dropout",)),
    Foreign(("lora_target", "lora_target_modules"), (f"{_T}.model.lora.targetModules",)),
    Foreign(("use_rslora", "rslora"), (f"{_T}.model.lora.rankStabilized",)),
    Foreign(
        ("load_in_4bit", "load_in_8bit", "quantization_config", "qlora", "bnb_config"),
        (f"{_T}.model.lora.baseDtype",),
        "frozen weights are kept in bf16 at the least; quantised ones need kernels of one vendor",
    ),
    Foreign(
        ("neftune_noise_alpha", "neftune_alpha", "noisy_embedding_alpha"),
        (f"{_T}.model.embeddingNoise",),
    ),
    Foreign(
        ("resize_token_embeddings", "resize_vocab", "resize_embedding_layer"),
        (f"{_T}.model.resizeEmbeddings.multipleOf",),
    ),
    Foreign(
        ("cast_lm_head_to_fp32", "fp32_lm_head", "upcast_lmhead_out", "lm_head_fp32"),
        (f"{_T}.model.headPrecision",),
    ),
    Foreign(
        ("hf_config_kwargs", "config_kwargs", "model_config_overrides"),
        (f"{_T}.model.configOverrides",),
    ),
    Foreign(
        ("model.type", "model_class", "model_loader"),
        (f"{_T}.model.config", f"{_T}.model.path"),
        "a model is of the `model_type` of its configuration, or of the one in its directory",
    ),
    Foreign(
        ("torch_dtype", "model_dtype"),
        (f"{_T}.runtime.precision", f"{_T}.model.lora.baseDtype"),
        "the type of weights that are trained decides what is computed with",
    ),
    Foreign(
        ("from_pretrained", "model_name_or_path", "name_or_path"), (f"{_T}.model.path",)
    ),
    Foreign(("block_size", "max_seq_length", "seq_length"), (f"{_T}.data.sequenceLength",)),
    Foreign(("train_type", "trainer_type", "stage_type"), (f"{_T}.recipe",)),
    Foreign(
        ("pack_samples", "sample_packing", "use_packing", "neat_packing", "padding_free"),
        (f"{_T}.data.packing",),
    ),
    Foreign(
        (
            "hub_dataset",
            "hf_dataset",
            "dataset_name",
            "dataset_config_name",
            "dataset_path",
        ),
        (f"{_T}.data.sources[].path",),
        "nothing is downloaded; save a data set of the hub as JSON Lines or Parquet",
    ),
    Foreign(
        ("data_collator", "collate_fn", "flat_batch", "flat_batcher", "padded_batch"),
        (f"{_T}.data.packing",),
        "documents and rows are packed, kept apart or one to a sample by the file",
    ),
    Foreign(
        ("div_length", "data.pad_to", "pad_to_multiple_of", "pad_to_max_length"),
        (f"{_T}.data.sequenceLength",),
        "all samples have one length, so that nothing is compiled again; packing leaves little to fill up",
    ),
    Foreign(
        ("drop_last", "dataloader_drop_last"),
        why="a step has one size throughout: behind the last samples of an epoch come the first of the next",
    ),
    Foreign(
        ("fuse_positions_prob", "fuse_positions"),
        (f"{_T}.data.packing",),
        "positions start again in each row, so that a packed row has the same loss as the row alone",
    ),
    Foreign(
        ("repeat_to_pack_max_length", "repeat_to_pack"),
        (f"{_T}.data.mixing", f"{_T}.data.sources[].weight"),
        "rows that fill up a sample would be learned more often than others; `mixing: passes` repeats whole "
        "sources",
    ),
    Foreign(
        ("ignore_empty_think", "ignore_empty_thoughts"),
        (f"{_T}.rows.chatTemplate",),
        "the generation blocks of a template mark what is learned, and can leave thoughts out",
    ),
    Foreign(("eval_sources", "eval_dataset"), (f"{_T}.evaluation.sources",)),
    Foreign(
        ("train_eval_split", "validation_split", "val_split"),
        (f"{_T}.data.heldOut",),
        "the share that is held out is the rest of the share that is trained on",
    ),
    Foreign(("cache_dir",), (f"{_T}.data.preparedDirectory",)),
    Foreign(
        ("cache_fs_type",),
        why="one rename publishes prepared data, on disks of one machine and of many alike",
    ),
    Foreign(
        ("fail_on_missing_cache",),
        why="it is a matter of one start: `evergrad run --require-prepared` prepares nothing",
    ),
    Foreign(
        ("tokenizer_chat_template", "chat_template_path"), (f"{_T}.rows.chatTemplate",)
    ),
    Foreign(
        (
            *(
                "completion_only_loss",
                "assistant_only_loss",
                "train_on_inputs",
                "mask_inputs",
            ),
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
        ("filter_samples", "truncation_mode", "excess_length_strategy"),
        (f"{_T}.rows.tooLong",),
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
        ("resume_from_checkpoint", "resume_from", "auto_resume"),
        (f"{_T}.initFrom.path",),
        "a run resumes by itself; a new run continues from another run's checkpoint with `load: everything`",
    ),
    Foreign(
        ("load_checkpoint_strategy", "load_optimizer", "load_weights_only"),
        (f"{_T}.initFrom.load",),
    ),
    Foreign(
        ("last_save_freq", "persistent_save_freq"),
        (f"{_T}.checkpoint.every", f"{_T}.checkpoint.keepEvery"),
        "`every` is of those that `keep` counts, `keepEvery` of those that are never removed",
    ),
    Foreign(
        ("save_every_n_epochs", "save_strategy"),
        (f"{_T}.checkpoint.every",),
        "sources repeat each in its own epochs; a rhythm is in steps, tokens or seconds",
    ),
    Foreign(
        ("save_end_of_training", "save_last"), why="state is saved at the end in any case"
    ),
    Foreign(
        ("checkpoint.enabled", "enable_checkpointing", "save_checkpoints"),
        (f"{_T}.checkpoint.every",),
        "a run without any that loses all its nodes would begin again at step 0",
    ),
    Foreign(
        ("checkpoint_engines", "checkpoint_engine", "checkpoint.type"),
        why="all checkpoints have one format, and can be resumed; `evergrad checkpoint export` makes "
        "a transformers directory of any of them, while the run trains",
    ),
    Foreign(
        ("exit_iteration_this_run", "max_steps_this_run"),
        (f"{_T}.stop.afterStep",),
        "a start is not part of a run whose nodes come and go; for one start by hand there is "
        "`evergrad run --stop-after-steps`",
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
        "one seed orders and chooses the samples of all sources",
    ),
    Foreign(("stopping_strategy", "stop_mode"), (f"{_T}.horizon.exhausted",)),
    Foreign(("sample_ratio", "sample_count"), (f"{_T}.data.sources[].samples",)),
    Foreign(("exp_name", "experiment_name", "run_name", "run_id"), ("metadata.name",)),
    Foreign(
        ("checkpoints_root_dir", "output_path", "output_dir"),
        ("spec.storage.path",),
        "a run writes everything into one directory; `evergrad run --run-directory` sets it",
    ),
)

_BY_NAME: Final[Mapping[str, Foreign]] = {
    fold(name): one for one in FOREIGN for name in one.names
}


def say_foreign(path: FieldPath) -> tuple[str, str, str] | None:
    """Return the mistake at the key ``path``, its reason and its remedy, if the key is a name from other
    trainers. Otherwise return None."""
    # Look up a name for one section before a name for all sections.
    names = (fold(".".join(map(str, path[-2:]))), fold(str(path[-1])))
    foreign = next((_BY_NAME[name] for name in names if name in _BY_NAME), None)
    if foreign is None:
        return None
    remedy = f"Write {' and '.join(foreign.fields)}" if foreign.fields else "Remove it"
    return "is an option of other trainers", foreign.why, remedy

"""Checks before the first step that need the machine: files, memory, space, devices and plausible settings.

The validation of the manifest is pure and does not happen here.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evergrad_common.contract import RunFile
from evergrad_common.text import size
from evergrad_manifest.derive import (
    is_model_trained,
    loss_chunk,
    slots_per_step,
    stage_ends,
    steps_without_data,
    why_not_exported,
)
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, InputError, Problem
from evergrad_manifest.training import RECIPES, REFERENCE_FIELD, Training
from evergrad_manifest.training.optimization import OF_OPTIMIZER
from evergrad_manifest.values.numbers import show
from evergrad_trainer.base.errors import CheckpointError, DataError, ModelError, VolumeError
from evergrad_trainer.base.machine import Machine, free_bytes
from evergrad_trainer.data.auto_tokenizer import COMBINED, TokenizerDifference
from evergrad_trainer.data.preparation.files import (
    evaluation_sources,
    find_files,
    training_sources,
)
from evergrad_trainer.data.preparation.missing_template import find_missing_template
from evergrad_trainer.data.tokenizers import (
    SAVE_AGAIN,
    TextTokenizer,
    check_saved,
    load_tokenizer,
    problem_of_difference,
)
from evergrad_trainer.models.build import ModelPlan, build_empty_model
from evergrad_trainer.models.compatibility import compare_functions
from evergrad_trainer.models.configuration import find_ignored_dtype
from evergrad_trainer.models.determinism import (
    CUBLAS_DETERMINISTIC,
    CUBLAS_VARIABLE,
    is_cublas_deterministic,
    needs_deterministic_kernels,
)
from evergrad_trainer.models.documents import check_packing
from evergrad_trainer.models.experts import check_experts
from evergrad_trainer.models.memory import ModelFacts, checkpoint_bytes, memory_of
from evergrad_trainer.models.parallel import problem_of_shards
from evergrad_trainer.objectives.linear_cross_entropy import PLAIN_HEADS
from evergrad_trainer.observers.trackers.libraries import check_trackers
from evergrad_trainer.optim.groups import unmatched_patterns
from evergrad_trainer.preflight.memory import (
    Finding,
    Level,
    check_architecture,
    check_base,
    check_frozen,
    check_memory,
    model_facts,
)
from evergrad_trainer.preflight.script import check_script, check_script_workers
from evergrad_trainer.recipes import load_task
from evergrad_trainer.training.initial_model import describe_weights, plan_initial

_TOKENIZER = "spec.training.tokenizer"
_SLOWEST_BF16_DECAY = 1 - 2**-8
"""The largest decay for moments in bf16: 1 minus half a step of bf16. A larger decay is lost in rounding."""
_NO_MACHINE = Machine(
    cores=1,
    memory_bytes=None,
    num_accelerators=0,
    accelerator_memory_bytes=None,
    has_cpp_compiler=True,
)
"""A placeholder for an unknown machine, for which no check reports a problem."""


@dataclass(frozen=True)
class Examination:
    """All findings, and the model's plan; None if the configuration cannot be read or the run is a script."""

    findings: tuple[Finding, ...]
    plan: ModelPlan | None


@dataclass(frozen=True)
class FileReport:
    """Problems and warnings in the file of a typed run, and in the model's files if they are on this machine.

    ``summary``: number of parameters, and the memory to train them on one worker; empty if they are unknown.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    summary: str


def examine(
    run: TrainingRun,
    *,
    base_directory: Path,
    run_directory: Path,
    machine: Machine,
    num_workers: int,
    world_sizes: Sequence[int] = (),
) -> Examination:
    """Make every check that reads at most the first row of the data.

    Does not allocate a model, and writes only a probe file.

    ``num_workers``: number of workers on this machine. ``world_sizes``: all numbers of workers that may train
    together as nodes join and leave, on machines like this one; by default only ``num_workers``.
    """
    if (script := run.spec.script) is not None:
        # The content of a script is not examined: the file must exist, and its workers must have devices.
        found = check_script(script, base_directory)
        workers = check_script_workers(run, machine, num_workers=num_workers)
        space = check_run_directory(run_directory, None, keep=0)
        return Examination((*found, *workers, *space), None)
    training = run.training
    sizes = world_sizes or (num_workers,)
    findings = [
        *check_files(training, base_directory),
        *check_device(training, machine),
        *check_workers(training, num_workers=max(sizes)),
        *check_shards(training, world_sizes=sizes),
        *(Finding("error", problem) for problem in check_trackers(training)),
    ]

    plan, facts, problems = _read_model(training, base_directory, run_directory)
    findings += [Finding("error", problem) for problem in problems]
    size: int | None = None
    if training.recipe in RECIPES:
        # Load only the recipes of Evergrad: the code of a user's recipe runs only in training.
        findings += [
            Finding("error", problem) for problem in _check_task(training, base_directory)
        ]
    findings += check_frozen(training, plan)
    findings += check_dtype(training, plan)
    findings += check_template(training, base_directory)
    findings += check_architecture(training, plan)
    if facts is not None and is_model_trained(training):
        # With fewer workers, each holds larger shards. Nodes on this machine free memory when they leave.
        bounds = {"world_size": max(num_workers, min(sizes)), "most_workers": max(sizes)}
        findings += check_model(training, facts)
        findings += check_base(training, base_directory, plan)
        findings += check_memory(
            training, facts, machine, num_workers=num_workers, **bounds
        )
        size = checkpoint_bytes(facts, training)
    findings += check_sources(training, base_directory, plan, run_directory=run_directory)
    has_begun = (run_directory / RunFile.RESOLVED).exists()
    findings += check_tokenizer(training, base_directory, plan, has_begun=has_begun)
    # A run that has begun continues with a warning, because its recipe cannot be changed any more.
    level: Level = "warning" if has_begun else "error"
    findings += [Finding(level, one) for one in find_traps(training, plan, machine=machine)]
    # A horizon in epochs has a number of steps only after the data are prepared.
    if (total := steps_without_data(training)) is not None:
        findings += check_cadences(training, total=total)
    # Last, because it writes. Checkpoints at boundaries between stages are kept in addition.
    keep = training.checkpoint.keep + len(stage_ends(training))
    findings += check_run_directory(run_directory, size, keep=keep)
    return Examination(tuple(findings), plan)


def _read_model(
    training: Training,
    base_directory: Path,
    run_directory: Path | None = None,
    *,
    is_tokenizer_here: bool = True,
) -> tuple[ModelPlan | None, ModelFacts | None, tuple[Problem, ...]]:
    """Read the model's plan and facts, or return its problems, so that the other checks still run.

    ``is_tokenizer_here``: whether the tokenizer can be read on this machine; if not, the size of the model's
    vocabulary is not checked.
    """
    plan: ModelPlan | None = None
    vocab_size: int | None = None
    try:
        if is_tokenizer_here:
            vocab_size = load_tokenizer(training.tokenizer, base_directory).vocab_size
        plan = plan_initial(
            training,
            base_directory=base_directory,
            vocab_size=vocab_size,
            run_directory=run_directory,
        )
        return plan, None if plan.config is None else model_facts(plan), ()
    except InputError as error:
        return plan, None, tuple(error.problems)


def _check_task(training: Training, base_directory: Path) -> Sequence[Problem]:
    """Return why the recipe cannot be loaded, for example a missing package, or what is wrong with its
    files."""
    try:
        task, _ = load_task(training, base_directory)
    except ConfigurationError as error:
        return error.problems
    problems: Sequence[Problem] = getattr(task, "check_files", tuple)()
    return problems


def examine_file(run: TrainingRun, base_directory: Path) -> FileReport:
    """Make the checks of ``examine`` that do not need the training machine, for `evergrad validate`.

    A model, a tokenizer or data that are missing on this machine are not a problem, because they may exist
    only on the cluster.
    """
    training = run.training
    findings: list[Finding] = []
    if (workers := run.spec.workers_per_node) is not None:
        findings += check_workers(training, num_workers=workers)
        findings += check_shards(training, world_sizes=(workers,))

    path = training.tokenizer.path
    is_here = path is None or (base_directory / path).exists()
    model_path = training.model.path
    plan: ModelPlan | None = None
    facts: ModelFacts | None = None
    initial = training.init_from
    source = model_path
    if not training.model.is_given and initial is not None:
        source = initial.path
    if source is None or (base_directory / source).exists():
        plan, facts, problems = _read_model(
            training, base_directory, is_tokenizer_here=is_here
        )
        findings += [Finding("error", problem) for problem in problems]
    findings += check_frozen(training, plan)
    findings += check_dtype(training, plan)
    findings += check_template(training, base_directory)
    findings += check_architecture(training, plan)
    if facts is not None and is_model_trained(training):
        findings += check_model(training, facts)
    if is_here:
        findings += check_tokenizer(training, base_directory, plan, has_begun=False)
    findings += [
        Finding("error", one) for one in find_traps(training, plan, machine=_NO_MACHINE)
    ]
    return FileReport(
        tuple(one.problem for one in findings if one.level == "error"),
        tuple(one.problem for one in findings if one.level == "warning"),
        _summarize(training, plan, facts) if is_here else "",
    )


def _summarize(training: Training, plan: ModelPlan | None, facts: ModelFacts | None) -> str:
    if plan is None:
        return ""
    if plan.config is None:
        return "a model that the task makes itself"
    if facts is None:
        return ""
    if not is_model_trained(training):
        return f"{facts.parameters:,} parameters, none of which is trained"
    need = memory_of(facts, training, world_size=1, on_accelerator=False, compiles=False)
    memory = size(need.total)
    trained = "" if facts.trained is None else f", {facts.trained:,} of them trained"
    return f"{facts.parameters:,} parameters{trained}, about {memory} to train them on each worker"


def check_files(training: Training, base_directory: Path) -> Iterator[Finding]:
    """Check that every source can be opened and is not empty; ``prepare`` reads the content later.

    Also warns if ``overfitFirstBatch`` limits the training to the samples of the first step.
    """
    for source in (
        *training_sources(training, base_directory),
        *evaluation_sources(training, base_directory),
    ):
        files, problems = find_files(source)
        yield from (Finding("error", problem) for problem in problems)
        if not problems:
            what = f"{sum(path.stat().st_size for path in files):,} bytes"
            if len(files) > 1:
                what += f" in {len(files):,} files"
            yield Finding("ok", Problem(str(source.path), what))
    if training.data.overfit_first_batch:
        what = "has each step train on the samples of the first: remove it after the test"
        yield Finding("warning", Problem("spec.training.data.overfitFirstBatch", what))


def check_tokenizer(
    training: Training, base_directory: Path, plan: ModelPlan | None, *, has_begun: bool
) -> Iterator[Finding]:
    """Check that AutoTokenizer produces the ids that the run trains on, from the tokenizer's directory and
    from an export, which contains the model's configuration too.

    ``has_begun``: a difference does not stop a run that has begun. Its export compares the ids again.
    """
    try:
        tokenizer = load_tokenizer(training.tokenizer, base_directory)
    except DataError:
        # The check of the model reports this error, because the vocabulary depends on the tokenizer.
        return
    difference, export_error = None, ""
    # A resume skips the slow comparison, because it would not refuse a difference.
    is_compared = not has_begun or bool(tokenizer.auto_error)
    if (
        plan is not None
        and plan.config is not None
        and is_compared
        and not why_not_exported(training)
    ):
        difference, export_error = _compare_export(tokenizer, plan)
    if tokenizer.auto_error:
        yield Finding("warning", _problem_of_fallback(training, tokenizer, export_error))
    elif export_error:
        # Only a warning: training does not need the export.
        what = f"AutoTokenizer cannot load an export of it: {export_error}"
        why = "users of the export need another program to load its tokenizer"
        yield Finding("warning", Problem(_TOKENIZER, what, why, SAVE_AGAIN))
    if difference is not None and not has_begun:
        level: Level = "warning" if difference.text in COMBINED else "error"
        yield Finding(level, problem_of_difference(difference))


def _compare_export(
    tokenizer: TextTokenizer, plan: ModelPlan
) -> tuple[TokenizerDifference | None, str]:
    """Compare the ids of ``tokenizer`` with the ids of an export that has the configuration of ``plan``.

    Returns the first difference or None, and the reason why AutoTokenizer cannot load the export; the reason
    is empty if it can.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        plan.require_config().save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        try:
            return check_saved(tokenizer, directory), ""
        except DataError as error:
            (problem,) = error.problems
            return None, problem.why


def _problem_of_fallback(
    training: Training, tokenizer: TextTokenizer, export_error: str
) -> Problem:
    """Build the problem of a tokenizer directory in which only tokenizer.json can be read."""
    why = (
        "texts get the ids of its tokenizer.json alone; tokens and settings that only its other files have "
        "do not count"
    )
    if export_error:
        why += ". AutoTokenizer will not load an export of this run either"
    return Problem(
        f"{_TOKENIZER}.path",
        f"AutoTokenizer cannot load {training.tokenizer.path}: {tokenizer.auto_error}",
        why,
        SAVE_AGAIN,
    )


def check_sources(
    training: Training,
    base_directory: Path,
    plan: ModelPlan | None,
    *,
    run_directory: Path,
) -> Iterator[Finding]:
    """Check that weights from other runs or models compute the same function in this model.

    They are compared again when they are loaded. Weights that cannot be read are reported then, not here.
    """
    if plan is None or plan.config is None or training.recipe not in RECIPES:
        return
    named: list[tuple[str, str, int | None]] = []
    pairs, initial = training.pair_settings, training.init_from
    if pairs is not None and pairs.reference is not None:
        named.append((REFERENCE_FIELD, pairs.reference, None))
    # A run that has begun reads it no more.
    if initial is not None and not (run_directory / RunFile.RESOLVED).exists():
        named.append(("spec.training.initFrom.path", initial.path, initial.step))
    for field, path, step in named:
        try:
            stored = describe_weights(base_directory / path, step=step, field=field)
        except (CheckpointError, VolumeError):
            continue
        except ModelError as error:
            yield from (Finding("error", one) for one in error.problems)
            continue
        if stored is None:
            continue
        problems, lines = compare_functions(
            stored, plan.describe(), where=path, field=field
        )
        yield from (Finding("error", one) for one in problems)
        yield from (Finding("warning", Problem(field, line)) for line in lines)


def check_run_directory(
    run_directory: Path, checkpoint_size: int | None, *, keep: int
) -> Iterator[Finding]:
    """Check that the run directory can be written and has space for the checkpoints that this run keeps.

    ``checkpoint_size``: bytes, or None if unknown. ``keep``: number of checkpoints that are kept.
    """
    # Write a real file: permissions, quotas and read-only mounts cause errors only on a write.
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=run_directory) as probe:
            probe.write(b"evergrad")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding(
            "error",
            Problem(
                str(run_directory),
                "the run directory cannot be written",
                reason,
                "Choose another with --run-directory, or free it",
                is_of_host=True,
            ),
        )
        return
    if checkpoint_size is not None:
        yield _check_space(run_directory, checkpoint_size, keep=keep)


def _check_space(run_directory: Path, checkpoint_size: int, *, keep: int) -> Finding:
    """Check that the disk has space for the checkpoints that this run keeps."""
    free = free_bytes(run_directory)
    # One more than ``keep``, because the newest is written before the oldest is removed.
    needed = checkpoint_size * (keep + 1)
    if free < 2 * checkpoint_size:
        return Finding(
            "error",
            Problem(
                str(run_directory),
                f"{size(free)} are free and one checkpoint takes {size(checkpoint_size)}",
                "two must fit, since the old one stays until the new one is whole",
                "Free some space or choose another run directory",
                is_of_host=True,
            ),
        )
    if free < needed:
        return Finding(
            "warning",
            Problem(
                str(run_directory),
                f"{size(free)} are free and {keep + 1} checkpoints take {size(needed)}",
                "",
                "Lower checkpoint.keep",
            ),
        )
    return Finding(
        "ok",
        Problem(
            str(run_directory),
            f"{size(free)} free, {keep + 1} checkpoints take {size(needed)}",
        ),
    )


def check_device(training: Training, machine: Machine) -> Iterator[Finding]:
    """Check that the device and the compiler that the file requires are available."""
    if training.runtime.device == "cuda" and machine.num_accelerators == 0:
        yield Finding(
            "error",
            Problem(
                "spec.training.runtime.device",
                "no cuda device is visible",
                "device: cuda was asked for",
                "Use device: auto, or check the driver",
                is_of_host=True,
            ),
        )
    # compile: on requires a compiler. With the default, auto, the run trains without one after a warning.
    on_accelerator = machine.num_accelerators > 0 and training.runtime.device != "cpu"
    wanted = training.runtime.compile
    if (
        machine.has_cpp_compiler
        or wanted == "off"
        or (wanted == "auto" and not on_accelerator)
    ):
        return
    where, what = "spec.training.runtime.compile", "no C++ compiler was found"
    if wanted == "on":
        why = "torch.compile needs one to build kernels"
        yield Finding(
            "error", Problem(where, what, why, "Install g++, or use compile: off")
        )
    else:
        why = "compile: auto trains without compilation where none is, and more slowly"
        yield Finding(
            "warning",
            Problem(
                where,
                what,
                why,
                "Build the image with a compiler (docs/start/installing.md)",
            ),
        )


def check_workers(training: Training, *, num_workers: int) -> Iterator[Finding]:
    """Check that every worker has a slot, and warn if workers are idle for a part of each step."""
    slots = slots_per_step(training.batching)
    if num_workers > slots:
        yield Finding(
            "error",
            Problem(
                "spec.workersPerNode",
                f"{num_workers} workers cannot share {slots} slots a step",
                "globalBatchSize / microBatchSize is the largest useful number of workers",
                f"Use at most {slots} workers, or a smaller microBatchSize",
            ),
        )
        return
    # In each round, a worker either computes one slot or waits for the other workers.
    idle = 1 - slots / (num_workers * math.ceil(slots / num_workers))
    if idle > 0:
        yield Finding(
            "warning",
            Problem(
                "spec.workersPerNode",
                f"{num_workers} workers share {slots} slots: {idle:.0%} of their time is idle",
                "",
                f"Choose a divisor of {slots}",
            ),
        )
    else:
        yield Finding(
            "ok", Problem("spec.workersPerNode", f"{num_workers} of up to {slots}")
        )


def check_shards(training: Training, *, world_sizes: Sequence[int]) -> Iterator[Finding]:
    """Check that every number of workers can be divided into groups that hold one copy of the model each.

    ``world_sizes``: all numbers of workers that may train together.
    """
    shards = training.runtime.shards
    if shards is None:
        return
    # Refuse the run now, because it would otherwise fail at a later change of nodes. A single worker holds
    # the whole model, so world size 1 is always valid.
    problems = (problem_of_shards(shards, size) for size in world_sizes if size > 1)
    problem = next((one for one in problems if one is not None), None)
    if problem is not None:
        yield Finding("error", problem)


def check_model(training: Training, facts: ModelFacts) -> Iterator[Finding]:
    """Check that samples are not longer than the model's number of positions."""
    length = training.data.sequence_length
    if facts.max_positions is not None and length > facts.max_positions:
        yield Finding(
            "error",
            Problem(
                "spec.training.data.sequenceLength",
                f"{length} is above the model's max_position_embeddings {facts.max_positions}",
                "later tokens would have no position",
                (
                    f"Lower it to {facts.max_positions}, or raise max_position_embeddings in the "
                    "model's configuration"
                ),
            ),
        )


def check_dtype(training: Training, plan: ModelPlan | None) -> Iterator[Finding]:
    """Warn about a dtype in the model's configuration that differs from the dtype of the trained weights."""
    if plan is None or plan.config is None:
        return
    precision = training.runtime.precision
    weights = str(plan.weight_type(precision)).removeprefix("torch.")
    model = training.model
    for field, values in (
        ("config", model.config),
        ("configOverrides", model.config_overrides),
    ):
        if (found := find_ignored_dtype(values or {}, weights)) is None:
            continue
        key, value = found
        what = f"{show(value)} has no effect: the weights are trained in {weights}"
        why = f"spec.training.runtime.precision is {precision}"
        remedy = f"Remove {key}, or choose another spec.training.runtime.precision"
        yield Finding(
            "warning", Problem(f"spec.training.model.{field}.{key}", what, why, remedy)
        )


def check_template(training: Training, base_directory: Path) -> Iterator[Finding]:
    """Check that conversations have a valid chat template, by the first row of each source that is here."""
    try:
        missing = find_missing_template(training, base_directory)
    except InputError as error:
        yield from (Finding("error", problem) for problem in error.problems)
        return
    if missing is not None:
        # Only a warning if data.malformed skips such rows, because valid rows may remain.
        is_refused = training.data.malformed == "refuse"
        yield Finding("error" if is_refused else "warning", missing)


def find_traps(
    training: Training, plan: ModelPlan | None, *, machine: Machine
) -> Iterator[Problem]:
    """Find settings that train without an error but probably not as the user intended."""
    yield from _check_tokenizer_of_path(training)
    if plan is not None and plan.config is not None:
        key = "config" if training.model.path is None else "path"
        yield from check_experts(plan.config, where=f"spec.training.model.{key}")
    if plan is not None and loss_chunk(training) is not None:
        yield from _check_chunks(training, plan)
    if plan is not None and plan.config is not None:
        yield from check_packing(
            plan.config,
            training.data,
            reads_rows=training.row_settings is not None,
            has_pairs=training.pair_settings is not None,
        )
    # Another check reports a model that cannot be built. The model of a user's recipe is unknown here.
    has_known_model = training.recipe in RECIPES and is_model_trained(training)
    if plan is not None and training.optimizer.groups and has_known_model:
        with contextlib.suppress(ModelError):
            model = build_empty_model(plan, precision="fp32")
            yield from unmatched_patterns(model, training.optimizer.groups)
    yield from _check_decays(training)
    yield from _check_kernels(training, machine)


def _check_tokenizer_of_path(training: Training) -> Iterator[Problem]:
    # The default tokenizer reads bytes, but a pretrained model has its own tokenizer.
    path = training.model.path
    if path is not None and "tokenizer" not in training.model_fields_set:
        yield Problem(
            "spec.training.tokenizer",
            f"missing, and the model in {path} would be trained on the ids of bytes",
            "a pretrained model knows the ids of its own tokenizer only",
            f"Write tokenizer: {{type: transformers, path: {path}}}, or {{type: byte}} if bytes are meant",
        )


def _check_chunks(training: Training, plan: ModelPlan) -> Iterator[Problem]:
    """Check that the loss of this model can be computed in chunks of the logits."""
    if plan.name in PLAIN_HEADS:
        return
    field, remedy = "runtime.lossChunk", "Leave lossChunk out, or use"
    if training.runtime.loss_chunk is None:
        # This recipe always uses chunks: without them it would hold all logits of two models.
        field, remedy = "model", "Use"
    yield Problem(
        f"spec.training.{field}",
        f"the logits of {plan.name} cannot be made in chunks",
        "they are known to be more than a linear layer, or not known to be one",
        f"{remedy} one of {', '.join(sorted(PLAIN_HEADS))}",
    )


def _check_decays(training: Training) -> Iterator[Problem]:
    # Moments in bf16 lose small decays in rounding. Check only the decays that this optimizer has.
    optimizer = training.optimizer
    unused = {one.key for one in OF_OPTIMIZER if optimizer.type in one.values}
    decays = {"betas": max(optimizer.betas), "momentum": optimizer.momentum}
    found = [(field, decay) for field, decay in decays.items() if field not in unused]
    field, slowest = max(found, key=lambda one: one[1], default=("type", 0.0))
    if training.runtime.precision == "bf16" and slowest > _SLOWEST_BF16_DECAY:
        yield Problem(
            f"spec.training.optimizer.{field}",
            f"{slowest} is too close to 1 for runtime.precision bf16",
            "bf16 has 8 bits: a moment that should shrink by less than a 256th is rounded back to what it "
            "was, and never falls",
            f"Use at most {_SLOWEST_BF16_DECAY:.3f}, or precision: bf16-autocast, whose moments are fp32",
        )


def _check_kernels(training: Training, machine: Machine) -> Iterator[Problem]:
    # Sums over ranks are always exact. Sums inside a kernel are exact only if cuBLAS is deterministic.
    on_accelerator = machine.num_accelerators > 0 and training.runtime.device != "cpu"
    settings = training.reproducibility
    if (
        on_accelerator
        and needs_deterministic_kernels(settings, on_accelerator=on_accelerator)
        and not is_cublas_deterministic()
    ):
        is_exact = settings.elastic == "exact"
        yield Problem(
            f"spec.training.reproducibility.{'elastic' if is_exact else 'deterministic'}",
            f"{'exact' if is_exact else 'true'} cannot be promised on an accelerator as it is",
            f"cuBLAS adds in varying order unless {CUBLAS_VARIABLE} is set",
            (
                f"Set {CUBLAS_VARIABLE}={CUBLAS_DETERMINISTIC[0]} in the environment "
                f"(spec.template.env), or use {'elastic: fast' if is_exact else 'deterministic: false'}"
            ),
        )


def check_cadences(training: Training, *, total: int) -> Iterator[Finding]:
    """Check that each periodic action of the file happens at least once in a run of ``total`` steps.

    For example, ``checkpoint.every.steps: 500`` in a run of 300 steps causes a warning.
    """
    at_end = "Evaluation happens at the end only"
    evaluation, saves = training.evaluation, training.checkpoint
    asked = [("evaluation.every", evaluation.every, at_end)]
    asked += [
        (f"evaluation.sets[{index}].every", one.every, at_end)
        for index, one in enumerate(evaluation.sets)
    ]
    firsts = [
        (f"{where}.steps", every.steps, every.steps, end)
        for where, every, end in asked
        if every is not None
    ]
    # A default cadence does not need a warning in a short run.
    every = saves.every if "every" in saves.model_fields_set else None
    tokens_per_step = training.batching.global_batch_size * training.sample_tokens
    for where, rhythm, end in (
        ("every", every, "State is saved at the end only"),
        ("keepEvery", saves.keep_every, "No checkpoint is kept for ever"),
    ):
        if rhythm is not None and rhythm.steps is not None:
            firsts.append((f"checkpoint.{where}.steps", rhythm.steps, rhythm.steps, end))
        if rhythm is not None and rhythm.tokens is not None:
            first = -(-rhythm.tokens // tokens_per_step)
            firsts.append((f"checkpoint.{where}.tokens", rhythm.tokens, first, end))
    if training.logging.profile is not None:
        profiled = training.logging.profile.first_step
        firsts.append(
            ("logging.profile.firstStep", profiled, profiled, "No trace is written")
        )
    for where, written, first, consequence in firsts:
        if first > total:
            what = f"{written} is beyond the last step {total}"
            yield Finding(
                "warning", Problem(f"spec.training.{where}", what, "", consequence)
            )
    has_data = bool(evaluation.sources) or training.data.held_out is not None
    cadences = (evaluation.every, *(one.every for one in evaluation.sets))
    if has_data and all(every is None for every in cadences):
        why = "there is something to evaluate on, and evaluation.every is not set"
        yield Finding("ok", Problem("spec.training.evaluation.every", at_end, why))

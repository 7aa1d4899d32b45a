"""Sections that every recipe has: checkpoints, the machine and the endpoint; and names that several files of
this folder use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section, Switch
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.values.numbers import Bytes, Count, Whole

TRAINING: Final = "spec.training"
"""Path of the typed recipe in the file."""
PREFERENCE: Final = "preference"
REFERENCE_FIELD: Final = f"spec.training.{PREFERENCE}.reference"
"""The field with weights that are compared with the trained weights."""
RECIPES: Final = ("pretrain", "sft", "two_stage_kl", PREFERENCE, "latent_edit")
"""Recipes with a name. Any other recipe is a custom task, ``module:attr``."""
OF_TEXT: Final = ("pretrain", "sft", "two_stage_kl", PREFERENCE)
"""Recipes that train the file's model on text. The others prepare their own data, as a custom task may."""

ROWS_A_PAIR: Final = 2
"""Rows of ``data.sequenceLength`` tokens in a pair."""
LENGTH_WITHOUT_DATA: Final = 1
"""Tokens in a sample of a task that prepares its data itself: each item counts as one token."""


def reads_pairs(view: View) -> bool:
    """Return whether a sample is a pair of rows: because of the recipe, or because a custom task has the
    section."""
    recipe = view.get(f"{TRAINING}.recipe")
    return recipe == PREFERENCE or (
        recipe not in (*RECIPES, UNKNOWN) and view.is_given(f"{TRAINING}.preference")
    )


@dataclass(frozen=True)
class Meaningless:
    """A key that has no meaning together with a value of the key ``beside``, and is refused if it is set."""

    key: str
    beside: str
    values: tuple[str, ...]
    remedy: str


def without_meaningless(
    section: Mapping[str, Any], table: tuple[Meaningless, ...]
) -> dict[str, Any]:
    """Return ``section``, in its JSON form, without the keys that would be refused in a file."""
    # Defaults fill in such keys, too, and a file with them would be refused.
    dropped = {entry.key for entry in table if section[entry.beside] in entry.values}
    return {key: value for key, value in section.items() if key not in dropped}


def meaningless_in(
    view: View, path: FieldPath, section: Mapping[str, Any], table: tuple[Meaningless, ...]
) -> Iterator[Problem]:
    """Yield a problem for each key of ``section`` that the file has and that has no meaning there."""
    # Check only keys in the file: the section always has the key, with its default.
    for entry in table:
        if section[entry.beside] in entry.values and view.raw(*path, entry.key) is not None:
            what = f"has no meaning with {entry.beside} {section[entry.beside]}"
            yield Problem(format_path((*path, entry.key)), what, "", entry.remedy)


class Every(Section):
    """A rhythm in steps."""

    steps: Count = Field(ge=1, le=10**12)
    """Optimizer steps between two times."""


class Reproducibility(Section):
    """Settings that make two runs equal."""

    seed: Count = Field(default=0, ge=0, lt=2**63)
    """Seed of the sample order, the initial weights and all randomness in the model."""
    # Separate from the seed, so that runs with different weights can use the same samples.
    data_seed: Count | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the sample order and of the held-out split. Default: ``seed``."""
    elastic: Literal["fast", "exact"] = "fast"
    """``exact``: bit-identical results for every number of processes, because gradient sums do not depend on
    their order. ``fast``: the same samples, but sums can differ in the last bits."""
    deterministic: bool = False
    """Use kernels that compute the same bits each time, on accelerators too. An operation without such a
    kernel ends the run. On accelerators, ``elastic: exact`` implies it."""

    @property
    def seed_of_data(self) -> int:
        """The seed of everything that decides which samples a step uses."""
        return self.seed if self.data_seed is None else self.data_seed


class Best(Section):
    """Which checkpoint is the best."""

    # The metric includes its set, because several sets have metrics of the same name.
    metric: str = Field(min_length=1)
    """``<evaluation set>/<metric>``, for example ``heldOut/loss``: the loss, the perplexity, or another
    metric of the evaluator."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller (``min``) or larger (``max``) values are better."""


class SaveEvery(Section):
    """A rhythm of saves: exactly one of the three."""

    steps: Count | None = Field(default=None, ge=1, le=10**12)
    """Optimizer steps between two times."""
    tokens: Count | None = Field(default=None, ge=1, le=10**18)
    """Tokens trained on between two times, rounded up to whole steps."""
    seconds: Whole | None = Field(default=None, ge=1, le=10**7)
    """Seconds between two times. For ``every`` only."""


class Checkpoint(Section):
    """When state is saved and what is kept."""

    # In steps and not in seconds, so that two runs of one file save the same states.
    every: SaveEvery = SaveEvery.model_validate({"steps": 500})
    """How often the run saves while training. It always saves at the end and when it stops."""
    keep: Count = Field(default=3, ge=1)
    """Number of valid checkpoints that are kept. The best checkpoint, the newest one and those of
    ``keepEvery`` are always kept."""
    keep_every: SaveEvery | None = None
    """Steps or tokens between two checkpoints that are never removed, in addition to ``keep``."""
    best: Best | None = None
    """Also keep the checkpoint with the best value of an evaluation metric."""
    export_at_end: Switch = False
    """Whether the final weights are also written as a transformers directory, ``exports/step-N``."""
    asynchronous: Switch = True
    """Write checkpoints in the background while training continues."""
    verify: Literal["always", "sizes"] = "always"
    """Checks before a checkpoint is loaded. ``always``: checksums and sizes. ``sizes``: only sizes."""
    max_failures: Count = Field(default=3, ge=1)
    """Number of failed saves in a row after which training ends. If the volume or the host is the cause,
    training starts again from the newest checkpoint."""


def check_rhythms(view: View) -> Iterator[Problem]:
    """Check that each save interval has one unit, and that ``keepEvery`` does not use seconds."""
    for key in ("every", "keepEvery"):
        path = f"{TRAINING}.checkpoint.{key}"
        # A section that could not be parsed already has a problem, and a default needs no check.
        if not view.is_given(path) or view.get(path) is UNKNOWN:
            continue
        units = ("steps", "tokens", "seconds")
        given = [unit for unit in units if view.is_given(f"{path}.{unit}")]
        if len(given) != 1:
            what = f"{' and '.join(given)} are set" if given else "has no length"
            why = "an interval is exactly one of steps, tokens and seconds"
            yield Problem(
                path, what, why, "Keep one, remove the rest" if given else "Add one"
            )
        elif given == ["seconds"] and key == "keepEvery":
            why = "the checkpoints that are never removed are chosen by step, not by time"
            yield Problem(
                f"{path}.seconds", "has no meaning here", why, "Use steps or tokens"
            )


def check_export(view: View) -> Iterator[Problem]:
    """Check that the file describes a model if it is exported as a transformers directory."""
    path = f"{TRAINING}.checkpoint.exportAtEnd"
    if view.get(path) is True and not view.is_given(f"{TRAINING}.model"):
        why = "the file describes no model of transformers"
        yield Problem(path, "there is nothing to export", why, "Remove it, or add `model`")


class InitFrom(Section):
    """State of another run to begin with."""

    path: LocalPath = Field(min_length=1)
    """A run directory (its newest valid checkpoint is used), one checkpoint, or a transformers directory
    (only weights)."""
    step: Whole | None = Field(default=None, ge=1, le=10**12)
    """Step of the checkpoint in a run directory. Default: the newest."""
    load: Literal["weights", "optimizer", "position", "everything"] = "weights"
    """``weights``: only the weights. ``optimizer``: also the state of the optimizer. ``position``: also the
    step and the position in each source, for any mixture. ``everything``: a resume, with the same data."""

    @property
    def goes_on(self) -> bool:
        """Whether training continues with the checkpoint's next step."""
        return self.load in ("position", "everything")


def check_position(view: View) -> Iterator[Problem]:
    """Check a position in another mixture: the new run must have one mixture, and its length must be known
    without the first run."""
    path = f"{TRAINING}.initFrom.load"
    if not view.is_given(path) or view.get(path) != "position":
        return
    if view.is_given(f"{TRAINING}.twoStageKl"):
        why = "each stage has a mixture of its own, and a position is that of one"
        remedy = "Use everything, in the same data, or optimizer"
        yield Problem(path, "position has no meaning with stages", why, remedy)
    horizon = f"{TRAINING}.horizon"
    if view.is_given(f"{horizon}.epochs") and not view.is_given(f"{horizon}.exhausted"):
        what = "epochs have no meaning with initFrom.load position"
        why = "the steps of the other run were passes over another mixture"
        remedy = (
            "Write steps or tokens, those of the other run with them, or add `exhausted`"
        )
        yield Problem(f"{horizon}.epochs", what, why, remedy)
    if view.get(f"{TRAINING}.data.overfitFirstBatch") is True:
        what = "has no meaning with initFrom.load position"
        why = "all steps would have the samples of the first, and no source would continue"
        yield Problem(f"{TRAINING}.data.overfitFirstBatch", what, why, "Remove it")


RECOMPUTATION_BY_SWITCH: Final = {True: "full", False: "none"}
"""``activationCheckpointing`` of the first versions → its current value."""


def _read_switch_as(words: Mapping[bool, str], given: Any) -> BeforeValidator:
    """Return a validator that reads true and false as ``words``. ``given``: the type of a value in a file."""

    def read(value: Any) -> Any:
        return words[value] if isinstance(value, bool) else value

    return BeforeValidator(read, json_schema_input_type=given)


Recomputation = Literal["none", "full", "offload", "selective"] | bool
OnOff = Literal["auto", "on", "off"] | bool


class Runtime(Section):
    """How the machine is used. All but precision, matmulPrecision and attention may differ from one start of
    a run to the next."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: cuda if the machine has it, otherwise cpu."""
    precision: Literal["fp32", "bf16-autocast", "fp16-autocast", "bf16"] = "bf16-autocast"
    """``fp32``, or ``bf16`` for weights and products. ``bf16-autocast`` and ``fp16-autocast`` (with a scaled
    loss) compute products in that type and keep fp32 weights."""
    # YAML reads a bare `on` or `off` as true or false.
    compile: Annotated[
        Literal["auto", "on", "off"], _read_switch_as({True: "on", False: "off"}, OnOff)
    ] = "auto"
    """Whether to use torch.compile. ``auto``: on with an accelerator."""
    # The first versions accepted only true and false here, and their files must remain valid.
    activation_checkpointing: Annotated[
        Literal["none", "full", "offload", "selective"],
        _read_switch_as(RECOMPUTATION_BY_SWITCH, Recomputation),
    ] = "none"
    """Recompute transformer blocks in the backward pass, which takes about a third more time. ``full`` (or
    true): the inputs of the blocks are kept. ``offload``: they are kept in host memory. ``selective``: matrix
    products and attention are kept, too."""
    matmul_precision: Literal["highest", "high"] = "highest"
    """Precision of matrix products of fp32 values. ``highest``: fp32. ``high``: TF32, on accelerators that
    support it."""
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Attention kernel. ``auto``: torch chooses. Any other kernel must be supported by the device."""
    parallelism: Literal["dataParallel", "fsdp2"] = "dataParallel"
    """``dataParallel``: replicate the model and sum gradients. ``fsdp2``: shard parameters, gradients and
    optimizer state."""
    shards: Count | None = Field(default=None, ge=2, le=2**16)
    """Number of workers that hold one copy of the model together (fsdp2), for example the workers of one
    node. The copies are trained in parallel (HSDP). Default: all workers hold one copy."""
    loss_chunk: Count | None = Field(default=None, ge=1, le=2**31)
    """Number of tokens whose logits are in memory at the same time, for example 1024. Default: all tokens of
    the micro-batch."""
    threads: Count | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each process. Default: cores / processes, and 1 with ``elastic: exact``."""
    bucket_size: Bytes | None = Field(default=None, ge=1024, le=2**34)
    """Size of a gradient bucket (dataParallel), for example ``4Mi``. Default: 4Mi on CPUs, 64Mi on
    accelerators."""
    collective_timeout_seconds: Whole = Field(default=600, ge=1, le=86400)
    """Seconds that a process waits for other processes in one exchange."""
    # The default is high, so that the cost is low: a comparison hashes the whole state.
    compare_replicas_every: int = Field(default=100, ge=0, le=2**31, strict=True)
    """Steps between two comparisons of the replicas' states. They are also compared before each save and in
    each new world. 0: no comparison."""


def check_runtime(view: View) -> Iterator[Problem]:
    """Check that exact sums use plain data parallelism, and that shards are set only for a sharded model."""
    # Sums in a fixed order require whole gradients, and a shard has only a part.
    found = view.known(
        f"{TRAINING}.reproducibility.elastic", f"{TRAINING}.runtime.parallelism"
    )
    if found is not None and found[0] == "exact" and found[1] != "dataParallel":
        yield Problem(
            f"{TRAINING}.reproducibility.elastic",
            f"exact cannot be combined with runtime.parallelism {found[1]}",
            "sums that do not depend on order need the whole gradient in one place",
            "Set runtime.parallelism: dataParallel, or elastic: fast",
        )

    # Whether shards divides the workers depends on the machines, and is checked before the first step.
    cut = view.known(f"{TRAINING}.runtime.shards", f"{TRAINING}.runtime.parallelism")
    if cut is not None and cut[0] is not None and cut[1] == "dataParallel":
        yield Problem(
            f"{TRAINING}.runtime.shards",
            "has no meaning with runtime.parallelism dataParallel",
            "each worker holds the whole model",
            "Set runtime.parallelism: fsdp2, or remove it",
        )


class Metrics(Section):
    """The Prometheus endpoint."""

    port: Count | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint. 0: any free port. Default: no endpoint, and 29402 on a cluster."""
    linger_seconds: Whole = Field(default=0, ge=0, le=600)
    """Seconds for which the endpoint stays after the end, so that Prometheus can scrape the last values."""


def check_metrics(view: View) -> Iterator[Problem]:
    """Check that no settings are made for an endpoint that does not exist."""
    yield from check_endpoint(view, f"{TRAINING}.metrics")


def check_endpoint(view: View, section: str) -> Iterator[Problem]:
    """Check that the metrics section at ``section`` has a port if it sets how long the endpoint stays."""
    path = f"{section}.lingerSeconds"
    found = view.known(path, f"{section}.port")
    if found is not None and found[0] > 0 and found[1] is None:
        yield Problem(
            path,
            "has no meaning without metrics.port",
            "there is no endpoint",
            "Add metrics.port, or remove it",
        )


RULES: Final = (check_rhythms, check_export, check_position, check_runtime, check_metrics)

"""Sections that every recipe has, whatever it trains: checkpoints, the machine, what is shown; and names
that several files of this folder use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from evergrad_manifest.base import LocalPath, Section, Switch
from evergrad_manifest.errors import Problem
from evergrad_manifest.fields import format_path
from evergrad_manifest.raw import FieldPath
from evergrad_manifest.values.numbers import Bytes, Count, Whole
from evergrad_manifest.view import UNKNOWN, View

TRAINING: Final = "spec.training"
"""Path of the typed recipe in the file."""
PREFERENCE: Final = "preference"
REFERENCE_FIELD: Final = f"spec.training.{PREFERENCE}.reference"
"""The field with weights that are compared with those that are trained."""
RECIPES: Final = ("pretrain", "sft", "two_stage_kl", PREFERENCE, "latent_edit")
"""Recipes that have a name. Any other is a task of the user's own, ``module:attr``."""
OF_TEXT: Final = ("pretrain", "sft", "two_stage_kl", PREFERENCE)
"""Those that train the file's model on text; the others prepare data of their own, as a task of the user's
own may."""

ROWS_A_PAIR: Final = 2
"""Rows of ``data.sequenceLength`` tokens that a pair takes."""
LENGTH_WITHOUT_DATA: Final = 1
"""Tokens a sample of a task that prepares its data itself: each of its items counts as one."""


def reads_pairs(view: View) -> bool:
    """Whether a sample is a pair of rows: by the recipe, or by the section that a task of the user's own
    has."""
    recipe = view.get(f"{TRAINING}.recipe")
    return recipe == PREFERENCE or (
        recipe not in (*RECIPES, UNKNOWN) and view.is_given(f"{TRAINING}.preference")
    )


@dataclass(frozen=True)
class Meaningless:
    """A key that has no meaning beside a value of its neighbour ``beside``, and is refused when set."""

    key: str
    beside: str
    values: tuple[str, ...]
    remedy: str


def without_meaningless(
    section: Mapping[str, Any], table: tuple[Meaningless, ...]
) -> dict[str, Any]:
    """``section`` on the wire without the keys that would be refused in a file."""
    # Defaults of such keys are filled in like all others, and a file with them would be refused.
    dropped = {entry.key for entry in table if section[entry.beside] in entry.values}
    return {key: value for key, value in section.items() if key not in dropped}


def meaningless_in(
    view: View, path: FieldPath, section: Mapping[str, Any], table: tuple[Meaningless, ...]
) -> Iterator[Problem]:
    """A problem for each key of ``section`` that the file has and that has no meaning there."""
    # Only what the file has counts: the section has the key in any case, with its default.
    for entry in table:
        if section[entry.beside] in entry.values and view.raw(*path, entry.key) is not None:
            what = f"has no meaning with {entry.beside} {section[entry.beside]}"
            yield Problem(format_path((*path, entry.key)), what, "", entry.remedy)


class Every(Section):
    """A rhythm in steps."""

    steps: Count = Field(ge=1, le=10**12)
    """Optimizer steps between two."""


class Reproducibility(Section):
    """Settings that make two runs equal."""

    seed: Count = Field(default=0, ge=0, lt=2**63)
    """Seed of the sample order, the initial weights and all randomness inside the model."""
    # Apart from the seed, so that runs with other weights can see the same samples.
    data_seed: Count | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the sample order and of what is held out; default: the seed."""
    elastic: Literal["fast", "exact"] = "fast"
    """``exact``: bit-identical results for every world size, by gradient sums that do not depend on order."""
    deterministic: bool = False
    """Kernels that compute the same bits each time, on accelerators, too; an operation that has none ends the
    run. ``exact`` implies it there."""

    @property
    def seed_of_data(self) -> int:
        """The seed of everything that decides which samples a step has."""
        return self.seed if self.data_seed is None else self.data_seed


class Best(Section):
    """Which checkpoint is the best."""

    # With its set: several sets have metrics of one name.
    metric: str = Field(min_length=1)
    """``<evaluation set>/<metric>``, e.g. ``heldOut/loss``: the loss, the perplexity, or what the evaluator
    measures besides."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""


class SaveEvery(Section):
    """A rhythm of saves: exactly one of the three."""

    steps: Count | None = Field(default=None, ge=1, le=10**12)
    """Optimizer steps between two."""
    tokens: Count | None = Field(default=None, ge=1, le=10**18)
    """Tokens trained on between two (rounded up to whole steps)."""
    seconds: Whole | None = Field(default=None, ge=1, le=10**7)
    """Seconds between two (``every`` only)."""


class Checkpoint(Section):
    """When state is saved and what is kept."""

    # In steps and not in seconds: two runs of one file then save the same states.
    every: SaveEvery = SaveEvery.model_validate({"steps": 500})
    """How often state is saved while training; it is always saved at the end and on a stop."""
    keep: Count = Field(default=3, ge=1)
    """How many validated checkpoints are kept; the best, the newest and those of ``keepEvery`` always are."""
    keep_every: SaveEvery | None = None
    """Steps or tokens between two further checkpoints that are never removed."""
    best: Best | None = None
    """Also keep the checkpoint with the best value of a named evaluation metric."""
    export_at_end: Switch = False
    """Whether the final weights are also written as a transformers directory, ``exports/step-N``."""
    asynchronous: Switch = True
    """Write in the background while training goes on."""
    verify: Literal["always", "sizes"] = "always"
    """Checks before a checkpoint is loaded: of checksums and sizes, or of sizes alone."""
    max_failures: Count = Field(default=3, ge=1)
    """Failed saves in a row after which training ends; it begins again at the newest checkpoint if volume or
    host is to blame."""


def check_rhythms(view: View) -> Iterator[Problem]:
    """A rhythm of saves is in one unit; which checkpoints are never removed follows from their steps."""
    for key in ("every", "keepEvery"):
        path = f"{TRAINING}.checkpoint.{key}"
        # A section that could not be read has its own problem already, and a default needs no check.
        if not view.is_given(path) or view.get(path) is UNKNOWN:
            continue
        units = ("steps", "tokens", "seconds")
        given = [unit for unit in units if view.is_given(f"{path}.{unit}")]
        if len(given) != 1:
            what = f"{' and '.join(given)} are set" if given else "has no length"
            why = "a rhythm is exactly one of steps, tokens and seconds"
            yield Problem(
                path, what, why, "Keep one, remove the rest" if given else "Add one"
            )
        elif given == ["seconds"] and key == "keepEvery":
            why = "which checkpoints are never removed follows from their steps, and not from a clock"
            yield Problem(
                f"{path}.seconds", "has no meaning here", why, "Use steps or tokens"
            )


def check_export(view: View) -> Iterator[Problem]:
    """Only a model that the file describes can be a transformers directory."""
    path = f"{TRAINING}.checkpoint.exportAtEnd"
    if view.get(path) is True and not view.is_given(f"{TRAINING}.model"):
        why = "the file describes no model of transformers"
        yield Problem(path, "there is nothing to export", why, "Remove it, or add `model`")


class InitFrom(Section):
    """State of another run to begin with."""

    path: LocalPath = Field(min_length=1)
    """A run directory (its newest valid checkpoint), one checkpoint, or a transformers directory (weights
    alone)."""
    step: Whole | None = Field(default=None, ge=1, le=10**12)
    """Step of the checkpoint in a run directory; default: the newest."""
    load: Literal["weights", "optimizer", "position", "everything"] = "weights"
    """``weights``; ``optimizer``: also its state; ``position``: also step and place in each source, in any
    mixture; ``everything``: a resume, in the same data."""

    @property
    def goes_on(self) -> bool:
        """Whether training goes on with the checkpoint's next step."""
        return self.load in ("position", "everything")


def check_position(view: View) -> Iterator[Problem]:
    """A position in another mixture is one in one mixture, and its length is known without the first one."""
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
        why = "all steps would have the samples of the first, and no source would go on"
        yield Problem(f"{TRAINING}.data.overfitFirstBatch", what, why, "Remove it")


RECOMPUTATION_BY_SWITCH: Final = {True: "full", False: "none"}
"""``activationCheckpointing`` of the first versions → what it meant."""


def _read_switch_as(words: Mapping[bool, str], given: Any) -> BeforeValidator:
    """A validator that reads true and false as ``words``. ``given``: the type of a value in a file."""

    def read(value: Any) -> Any:
        return words[value] if isinstance(value, bool) else value

    return BeforeValidator(read, json_schema_input_type=given)


Recomputation = Literal["none", "full", "offload", "selective"] | bool
OnOff = Literal["auto", "on", "off"] | bool


class Runtime(Section):
    """How the machine is used. All but precision, matmulPrecision and attention may differ from one start of
    a run to the next."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: cuda where there is one, else cpu."""
    precision: Literal["fp32", "bf16-autocast", "fp16-autocast", "bf16"] = "bf16-autocast"
    """fp32; bf16 or fp16 (scaled loss) products over fp32 weights; or all of bf16."""
    # YAML reads a bare `on` or `off` as true or false.
    compile: Annotated[
        Literal["auto", "on", "off"], _read_switch_as({True: "on", False: "off"}, OnOff)
    ] = "auto"
    """torch.compile; ``auto``: on with an accelerator."""
    # The first versions knew only true and false here, and their files have to go on.
    activation_checkpointing: Annotated[
        Literal["none", "full", "offload", "selective"],
        _read_switch_as(RECOMPUTATION_BY_SWITCH, Recomputation),
    ] = "none"
    """Recompute transformer blocks in the backward pass: a third more time. ``full`` (or true): inputs
    are kept; ``offload``: in host memory; ``selective``: matrix products and attention, too."""
    matmul_precision: Literal["highest", "high"] = "highest"
    """Matrix products of fp32 values: in fp32, or in TF32 (``high``), which accelerators have."""
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Kernel of attention: torch's choice, or this one, which the device must have."""
    parallelism: Literal["dataParallel", "fsdp2"] = "dataParallel"
    """Replicate the model and sum gradients, or shard parameters, gradients and optimizer state."""
    shards: Count | None = Field(default=None, ge=2, le=2**16)
    """Workers that hold one copy of the model together (fsdp2), such as those of a node; copies stand side by
    side (HSDP). Default: all workers hold one copy."""
    loss_chunk: Count | None = Field(default=None, ge=1, le=2**31)
    """Tokens whose logits are in memory at a time, such as 1024; default: those of the whole micro-batch."""
    threads: Count | None = Field(default=None, ge=1, le=1024)
    """CPU threads a process; default: cores / processes, and 1 in exact mode."""
    bucket_size: Bytes | None = Field(default=None, ge=1024, le=2**34)
    """Bytes a gradient bucket (dataParallel), such as ``4Mi``; default: 4Mi on CPUs, 64Mi on accelerators."""
    collective_timeout_seconds: Whole = Field(default=600, ge=1, le=86400)
    """Seconds: how long a process waits for the others inside one exchange."""
    # Rare enough to cost little: a comparison hashes the whole state.
    compare_replicas_every: int = Field(default=100, ge=0, le=2**31, strict=True)
    """Steps between two comparisons of the replicas' states, also made before each save and in each new
    world; 0: none."""


def check_runtime(view: View) -> Iterator[Problem]:
    """Exact sums exist for plain data parallelism only, and copies of shards for a sharded model only."""
    # Sums in a fixed order are made of whole gradients, of which a shard has only a part.
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
    """Port of the Prometheus endpoint; 0: any free one; default: no endpoint, on a cluster 29402."""
    linger_seconds: Whole = Field(default=0, ge=0, le=600)
    """Seconds the endpoint stays after the end, so that the last values are scraped."""


def check_metrics(view: View) -> Iterator[Problem]:
    """An endpoint that does not exist cannot stay."""
    yield from check_endpoint(view, f"{TRAINING}.metrics")


def check_endpoint(view: View, section: str) -> Iterator[Problem]:
    """An endpoint of the metrics section at ``section`` that does not exist cannot stay."""
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

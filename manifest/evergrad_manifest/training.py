"""``spec.training``: the typed recipe.

Frozen and pure: no device, file, network, process group or logging.
"""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from evergrad_manifest.base import FieldValueError, LocalPath, Section, Switch
from evergrad_manifest.reading.numbers import (
    Bytes,
    Count,
    Fraction,
    Real,
    StepsOrFraction,
    Whole,
    show,
)

NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
HELD_OUT = "heldOut"
"""Name of the evaluation set that ``data.heldOut`` makes."""


RECIPES: Final = ("pretrain",)
"""Recipes that have a name. Any other is a task of the user's own, ``module:attr``."""
_OWN_TASK: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def check_recipe(recipe: str) -> str:
    """``recipe`` itself. Raises FieldValueError for what is neither a recipe's name nor ``module:attr``."""
    if recipe in RECIPES or _OWN_TASK.fullmatch(recipe):
        return recipe
    remedy = "Write module:attr, such as my_task:Task for the class Task of my_task.py"
    if "/" in recipe or ".py:" in recipe:
        module = recipe.rpartition("/")[2].replace(".py:", ":")
        remedy = (
            f"Write {module} for a file beside this one"
            if _OWN_TASK.fullmatch(module)
            else remedy
        )
    why = f"it is one of {', '.join(RECIPES)}, or a task of your own as module:attr"
    raise FieldValueError(f"{show(recipe)} is not a recipe", why, remedy)


def _on_or_off(value: Any) -> Any:
    """YAML reads a bare ``on`` or ``off`` as true or false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Reproducibility(Section):
    """What makes two runs equal."""

    seed: Count = Field(default=0, ge=0, lt=2**63)
    """Seed of the sample order, the initial weights and all randomness inside the model."""
    elastic: Literal["fast", "exact"] = "fast"
    """``exact``: bit-identical results for every world size, by gradient sums that do not depend on order."""


class Model(Section):
    """A transformers causal model. Exactly one of ``config`` and ``path``."""

    config: dict[str, Any] | None = None
    """A transformers configuration, verbatim, with its ``model_type``; weights are initialised
    from the seed."""
    path: LocalPath | None = None
    """A local transformers directory: configuration and, when present, safetensors weights."""


class Tokenizer(Section):
    """How text becomes token ids."""

    type: Literal["byte", "transformers"] = "byte"
    """``byte``: UTF-8 bytes 0-255 plus 256 for the end of a document.

    ``transformers``: a local tokenizer directory.
    """
    path: LocalPath | None = None
    """Directory of the transformers tokenizer; needed for that type and refused for the other."""


class Source(Section):
    """One file of samples."""

    name: str = Field(min_length=1, max_length=63, pattern=NAME_PATTERN)
    """Unique among all sources, whatever the case of its letters; appears in sample ids and messages."""
    type: Literal["jsonl", "tokens"] = "jsonl"
    """``jsonl``: one JSON object with a text a line. ``tokens``: a flat file of little-endian token ids."""
    path: LocalPath = Field(min_length=1)
    """The file; relative to the manifest for ``evergrad run``, absolute inside the pod on a cluster."""
    weight: Real = Field(default=1.0, gt=0, le=1e9)
    """Share of the samples drawn from this source, relative to the other weights."""
    text_field: str = Field(default="text", min_length=1)
    """jsonl only: key of the text in each object."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """tokens only: type of the ids."""


class HeldOut(Section):
    """Documents of the training sources kept for evaluation, chosen by the seed. Exactly one of both."""

    fraction: Fraction | None = Field(default=None, gt=0, lt=1)
    """Share of each source's documents (of a tokens source: the share of its tokens, at its end)."""
    count: Count | None = Field(default=None, ge=1)
    """Number of documents of each source; not for tokens sources."""


class Data(Section):
    """What is trained on."""

    sources: tuple[Source, ...] = Field(min_length=1, max_length=64)
    """Where samples come from, mixed by weight."""
    sequence_length: Count = Field(ge=8, le=2**20)
    """Tokens a sample, S: the window the model sees."""
    held_out: HeldOut | None = None
    """Evaluate on a part of the training sources, which is then never trained on."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """What happens to a line that is not a JSON object with a text: stop, or count it and go on."""
    prepared_directory: LocalPath | None = None
    """Where prepared token files are kept; default: ``.prepared`` beside the run directory."""


class Batching(Section):
    """How many samples make a step, and how the step is cut into slots."""

    global_batch_size: Count = Field(ge=1, le=2**24)
    """Samples an optimizer step, G, whatever the number of processes."""
    micro_batch_size: Count = Field(ge=1, le=2**20)
    """Samples a forward pass, b. M = G / b slots a step; up to M processes can share them."""


Beta = Annotated[Real, Field(ge=0, lt=1)]


class Optimizer(Section):
    """The update rule."""

    type: Literal["adamw"] = "adamw"
    """AdamW, fused."""
    learning_rate: Real = Field(gt=0, le=10)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moments, each in [0, 1)."""
    epsilon: Real = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator of the update."""
    weight_decay: Real = Field(default=0.1, ge=0, le=1)
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    clip_norm: Real = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""


class Schedule(Section):
    """Learning rate as a pure function of the step. Its length is the horizon, not the stop step."""

    type: Literal["wsd", "linear", "cosine", "constant"] = "wsd"
    """``wsd``: warm-up, stable, linear decay at the end."""
    warmup: StepsOrFraction = Field(default=0, ge=0)
    """Steps, or a fraction of the horizon (``5%``), of linear warm-up."""
    decay: StepsOrFraction = Field(default=0.2, ge=0)
    """wsd only: steps, or a fraction of the horizon (``20%``), of the final decay."""
    minimum_ratio: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak; not for constant."""


class Horizon(Section):
    """How long the run is. Exactly one of the three; the others are derived."""

    steps: Count | None = Field(default=None, ge=1, le=10**12)
    """Optimizer steps."""
    epochs: Real | None = Field(default=None, gt=0, le=10**6)
    """Passes over all sources together (rounded up to whole steps)."""
    tokens: Count | None = Field(default=None, ge=1, le=10**18)
    """Tokens trained on (rounded up to whole steps)."""


class Stop(Section):
    """When to stop before the horizon."""

    after_step: Count | None = Field(default=None, ge=1)
    """Stop, state saved, when this step is finished; the schedule still follows the horizon."""


class OnNonFinite(Section):
    """What follows a step whose loss or gradient norm is not finite.

    The state before it is always saved first.
    """

    skip: int = Field(default=0, ge=0, le=1000, strict=True)
    """How many such steps in a row are skipped: counted, but without an update."""
    then: Literal["stop"] = "stop"
    """What follows when there are more of them in a row.

    ``stop``: the run stops, its state saved, and can be resumed.
    """


SkippedStep = Annotated[int, Strict(), Field(ge=1, le=10**12)]
"""A plain number, without units: a rule for each item of a list would use up the budget of API servers."""


class StepOverride(Section):
    """Values that replace those of the recipe from a step on, until the next one says otherwise."""

    from_step: Count = Field(ge=1, le=10**12)
    """The first step they hold for. A step that was trained before they were written stays as it is."""
    learning_rate: Real | None = Field(default=None, gt=0, le=10)
    """Peak learning rate; warm-up and decay stay those of the schedule."""
    clip_norm: Real | None = Field(default=None, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""


class Every(Section):
    """A rhythm in steps."""

    steps: Count = Field(ge=1, le=10**12)
    """Optimizer steps between two."""


class Best(Section):
    """Which checkpoint is the best."""

    metric: str = Field(min_length=1)
    """``<evaluation set>/loss``, e.g. ``heldOut/loss``."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""


class Checkpoint(Section):
    """When state is saved and what is kept."""

    every: Every = Every.model_validate({"steps": 500})
    """How often state is saved while training; it is always saved at the end and on a stop."""
    keep: Count = Field(default=3, ge=1)
    """How many validated checkpoints are kept; the best and the newest always are."""
    best: Best | None = None
    """Also keep the checkpoint with the best value of a named evaluation metric."""
    asynchronous: Switch = True
    """Write in the background while training goes on."""
    verify: Literal["always", "sizes"] = "always"
    """What is checked before a checkpoint is loaded: checksums and sizes, or sizes alone."""
    max_failures: Count = Field(default=3, ge=1)
    """Failed saves in a row after which training ends; it begins again at the newest checkpoint if volume or
    host is to blame."""


class EvaluationSource(Source):
    """A file that is only evaluated on."""

    weight: Real = Field(default=1.0, gt=0, le=1e9)
    """Refused: a file that is only evaluated on is read whole, whatever its weight."""


class Evaluation(Section):
    """Loss on text that is not trained on."""

    every: Every | None = None
    """How often while training; default: only at the end."""
    at_start: Switch = False
    """Also before the first step."""
    sources: tuple[EvaluationSource, ...] = Field(default=(), max_length=16)
    """Separate files to evaluate on, each a named set; ``heldOut`` is the name of the split that
    ``data.heldOut`` makes."""
    samples: Count | None = Field(default=None, ge=1)
    """At most this many samples of each set, the same ones each time; default: all."""


class InitFrom(Section):
    """Weights of another run."""

    path: LocalPath = Field(min_length=1)
    """A transformers directory, a run directory (its newest valid checkpoint) or one checkpoint: weights
    only."""


OnOff = Literal["auto", "on", "off"] | bool


class Runtime(Section):
    """How the machine is used. All but the precision may differ from one start of a run to the next."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: cuda where there is one, else cpu."""
    precision: Literal["fp32", "bf16-autocast", "bf16"] = "bf16-autocast"
    """fp32; bf16 matrix products over fp32 weights; or weights, gradients and moments all in bf16."""
    compile: Annotated[
        Literal["auto", "on", "off"], BeforeValidator(_on_or_off, json_schema_input_type=OnOff)
    ] = "auto"
    """torch.compile; ``auto``: on with an accelerator."""
    activation_checkpointing: Switch = False
    """Recompute each transformer block in the backward pass: less memory, about a third more time."""
    parallelism: Literal["dataParallel", "fsdp2"] = "dataParallel"
    """Replicate the model and sum gradients, or shard parameters, gradients and optimizer state."""
    loss_chunk: Count | None = Field(default=None, ge=1, le=2**31)
    """Tokens whose logits are in memory at a time, such as 1024; default: those of the whole micro-batch."""
    threads: Count | None = Field(default=None, ge=1, le=1024)
    """CPU threads a process; default: cores / processes, and 1 in exact mode."""
    bucket_size: Bytes | None = Field(default=None, ge=1024, le=2**34)
    """Bytes a gradient bucket (dataParallel), such as ``4Mi``; default: 4Mi on CPUs, 64Mi on accelerators."""
    collective_timeout_seconds: Whole = Field(default=600, ge=1, le=86400)
    """Seconds: how long a process waits for the others inside one exchange."""
    compare_replicas_every: int = Field(default=100, ge=0, le=2**31, strict=True)
    """Steps between two comparisons of the replicas' states, also made before each save and in each new
    world; 0: none."""


class Logging(Section):
    """What is printed."""

    every: Every = Every.model_validate({"steps": 10})
    """How often a line is printed where there is no terminal."""


class Metrics(Section):
    """The Prometheus endpoint."""

    port: Count | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0: any free one; default: no endpoint, on a cluster 29402."""
    linger_seconds: Whole = Field(default=0, ge=0, le=600)
    """Seconds the endpoint stays after the end, so that the last values are scraped."""


class Training(Section):
    """The typed recipe."""

    recipe: Annotated[str, AfterValidator(check_recipe), Field(max_length=253)] = "pretrain"
    """What is trained: ``pretrain``, or a task of your own as ``module:attr``, a name in a Python file that
    lies beside this one or can be imported."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a task of your own (``recipe: module:attr``), in its own words; it checks them before the
    first step."""
    files: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Python files of a task of your own, text by name (``task.py``), where they cannot lie beside this file:
    on a cluster. ``evergrad submit`` fills them in."""
    model: Model
    """The model: exactly one of a configuration and a directory."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes token ids."""
    data: Data
    """What is trained on."""
    batching: Batching
    """How many samples make a step. Every number of processes trains the same steps."""
    optimizer: Optimizer
    """The update rule."""
    schedule: Schedule = Schedule()
    """Learning rate over the horizon."""
    horizon: Horizon
    """How long the run is: exactly one of steps, epochs and tokens."""
    stop: Stop = Stop()
    """When to stop before the horizon."""
    on_non_finite: OnNonFinite = OnNonFinite()
    """What follows a step whose loss or gradient norm is not finite. May be changed in place."""
    skip_steps: tuple[SkippedStep, ...] = Field(default=(), max_length=64)
    """Steps that are passed over without an update, such as one whose samples spoil it.

    May be changed in place.
    """
    overrides: tuple[StepOverride, ...] = Field(default=(), max_length=64)
    """Values that replace those of the recipe from a step on, in the order of their steps.

    May be changed in place.
    """
    checkpoint: Checkpoint = Checkpoint()
    """When state is saved and what is kept."""
    evaluation: Evaluation = Evaluation()
    """Loss on text that is not trained on."""
    init_from: InitFrom | None = None
    """Weights to begin a fresh run with; ignored when the run already has checkpoints."""
    reproducibility: Reproducibility = Reproducibility()
    """What makes two runs equal."""
    runtime: Runtime = Runtime()
    """How the machine is used; all but the precision may differ from one start to the next."""
    logging: Logging = Logging()
    """What is printed."""
    metrics: Metrics = Metrics()
    """The Prometheus endpoint."""

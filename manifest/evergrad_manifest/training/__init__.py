"""``spec.training``: the complete typed recipe. The rules of each field are in the file of its section.

Frozen and pure: no device, file, network, process group or logging.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, model_validator

from evergrad_manifest.model.base import FreeMapping, Section
from evergrad_manifest.training.common import (
    PREFERENCE,
    RECIPES,
    REFERENCE_FIELD,
    ROWS_A_PAIR,
    Best,
    Checkpoint,
    Every,
    InitFrom,
    Metrics,
    Reproducibility,
    Runtime,
    SaveEvery,
)
from evergrad_manifest.training.common import RULES as RULES_OF_ALL
from evergrad_manifest.training.latent_edit import RULES as RULES_OF_LATENT_EDIT
from evergrad_manifest.training.latent_edit import LatentEdit
from evergrad_manifest.training.model import Lora, Model, ResizeEmbeddings
from evergrad_manifest.training.observing import RULES as RULES_OF_OBSERVING
from evergrad_manifest.training.observing import (
    Logging,
    Monitor,
    Profile,
    Tracker,
)
from evergrad_manifest.training.optimization import RULES as RULES_OF_OPTIMIZATION
from evergrad_manifest.training.optimization import (
    Ema,
    Optimizer,
    ParameterGroup,
    Piece,
    Schedule,
)
from evergrad_manifest.training.own_task import RULES as RULES_OF_OWN_TASK
from evergrad_manifest.training.own_task import check_recipe
from evergrad_manifest.training.preference import RULES as RULES_OF_PREFERENCE
from evergrad_manifest.training.preference import Preference
from evergrad_manifest.training.pretrain import (
    HELD_OUT,
    METRICS_OF_ALL,
    NO_DATA,
    TEXT_TYPES,
    Data,
    Evaluation,
    EvaluationSetting,
    EvaluationSource,
    HeldOut,
    Source,
)
from evergrad_manifest.training.pretrain import RULES as RULES_OF_PRETRAIN
from evergrad_manifest.training.sft import (
    CONVERSATIONS,
    GENERATED,
    MESSAGES,
    SFT,
    Generation,
    RowSettings,
)
from evergrad_manifest.training.sft import RULES as RULES_OF_SFT
from evergrad_manifest.training.steps import RULES as RULES_OF_STEPS
from evergrad_manifest.training.steps import (
    Batching,
    EarlyStop,
    Horizon,
    OnNonFinite,
    SkippedStep,
    StepOverride,
    Stop,
)
from evergrad_manifest.training.tokenizer import RULES as RULES_OF_TOKENIZER
from evergrad_manifest.training.tokenizer import Tokenizer
from evergrad_manifest.training.two_stage_kl import RULES as RULES_OF_TWO_STAGE_KL
from evergrad_manifest.training.two_stage_kl import KlStage, TwoStageKl

__all__ = [
    "CONVERSATIONS",
    "GENERATED",
    "HELD_OUT",
    "MESSAGES",
    "METRICS_OF_ALL",
    "NO_DATA",
    "RECIPES",
    "REFERENCE_FIELD",
    "RULES",
    "TEXT_TYPES",
    "Batching",
    "Best",
    "Checkpoint",
    "Data",
    "EarlyStop",
    "Ema",
    "Evaluation",
    "EvaluationSetting",
    "EvaluationSource",
    "Every",
    "Generation",
    "HeldOut",
    "Horizon",
    "InitFrom",
    "KlStage",
    "LatentEdit",
    "Logging",
    "Lora",
    "Metrics",
    "Model",
    "Monitor",
    "OnNonFinite",
    "Optimizer",
    "ParameterGroup",
    "Piece",
    "Preference",
    "Profile",
    "Reproducibility",
    "ResizeEmbeddings",
    "RowSettings",
    "Runtime",
    "SaveEvery",
    "Schedule",
    "Source",
    "StepOverride",
    "Stop",
    "Tokenizer",
    "Tracker",
    "Training",
    "TwoStageKl",
]


class Training(Section):
    """The typed recipe."""

    recipe: Annotated[str, AfterValidator(check_recipe), Field(max_length=253)] = "pretrain"
    """Recipe to train: ``pretrain``, ``sft``, ``two_stage_kl``, ``preference``, ``latent_edit``, or your own
    task as ``module:attr``. For example, ``task.py`` next to this file is ``task:MyTask``. The module can
    also be importable."""
    options: FreeMapping = Field(default_factory=dict)
    """Options of your own task (``recipe: module:attr``), in its own format. The task checks them before the
    first step."""
    files: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Python files of your own task, as texts by name (``task.py``), for a cluster, where they cannot be next
    to this file. ``evergrad submit`` fills them in."""
    model: Model = Model.model_validate({})
    """The model: either a configuration or a directory. Your own task can leave it out."""
    tokenizer: Tokenizer = Tokenizer()
    """Tokenizer, which converts text to token ids."""
    data: Data = NO_DATA
    """Data to train on. Your own task can leave it out and prepare its data itself."""
    rows: RowSettings | None = None
    """How the recipe ``sft``, and your own tasks that derive from it, read rows."""
    batching: Batching
    """Number of samples in a step. The steps are the same for every number of processes."""
    optimizer: Optimizer
    """Optimizer and its settings."""
    schedule: Schedule = Schedule()
    """Schedule of the learning rate over the horizon."""
    ema: Ema | None = None
    """Exponential moving average of the weights over the updates."""
    horizon: Horizon
    """Length of the run: exactly one of steps, epochs and tokens."""
    stop: Stop = Stop()
    """Conditions to stop before the horizon."""
    on_non_finite: OnNonFinite = OnNonFinite()
    """What happens after a step whose loss or gradient norm is not finite. You can change it while the run
    trains."""
    skip_steps: tuple[SkippedStep, ...] = Field(default=(), max_length=64)
    """Steps that make no update, for example because their samples are damaged. You can change it while the
    run trains."""
    overrides: tuple[StepOverride, ...] = Field(default=(), max_length=64)
    """Values that replace values of the recipe from a step on, in the order of their steps. You can change it
    while the run trains."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run saves its state, and which checkpoints it keeps."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on text that is not trained on."""
    init_from: InitFrom | None = None
    """State from which a new run starts. Ignored once the run has checkpoints."""
    reproducibility: Reproducibility = Reproducibility()
    """Settings that make two runs equal."""
    runtime: Runtime = Runtime()
    """How the run uses the machine. All fields except those of the arithmetic can change from one start to
    the next."""
    logging: Logging = Logging()
    """Printed lines, trackers of experiments, and traces. You can change it while the run trains."""
    monitors: tuple[Monitor, ...] = Field(default=(), max_length=8)
    """Monitors of metrics. You can change it while the run trains."""
    metrics: Metrics = Metrics()
    """The Prometheus endpoint."""
    two_stage_kl: TwoStageKl | None = None
    """Stages and penalty of ``recipe: two_stage_kl``."""
    preference: Preference | None = None
    """Loss, reference and keys of ``recipe: preference``, and of your own tasks that derive from it."""
    latent_edit: LatentEdit | None = None
    """Corpus, encoder and loss of ``recipe: latent_edit``."""

    @model_validator(mode="before")
    @classmethod
    def _fill_packing(cls, raw: Any) -> Any:
        """Fill in the default packing, because rows have another default than texts."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("data"), Mapping):
            return raw
        has_pairs = raw.get("recipe") == PREFERENCE or raw.get("preference") is not None
        reads_rows = raw.get("recipe") == SFT or raw.get("rows") is not None
        if not (reads_rows or has_pairs) or raw["data"].get("packing") is not None:
            return raw
        packing = "none" if has_pairs else "documents"
        return {**raw, "data": {**raw["data"], "packing": packing}}

    @property
    def row_settings(self) -> RowSettings | None:
        """Settings for reading the sources as rows; None if their documents are texts."""
        reads_rows = self.recipe == SFT or self.pair_settings is not None
        return RowSettings() if self.rows is None and reads_rows else self.rows

    @property
    def pair_settings(self) -> Preference | None:
        """Settings for reading the rows as pairs; None if they are not pairs."""
        is_default = self.preference is None and self.recipe == PREFERENCE
        return Preference() if is_default else self.preference

    @property
    def row_fields(self) -> tuple[str, ...]:
        """The keys that define a row; empty if documents are texts."""
        rows, pairs = self.row_settings, self.pair_settings
        if rows is not None and pairs is not None:
            return rows.prompt_field, pairs.chosen_field, pairs.rejected_field
        return () if rows is None else rows.fields

    @property
    def sample_tokens(self) -> int:
        """Number of tokens in a sample, including padding. For a pair, the tokens of both rows."""
        rows = 1 if self.pair_settings is None else ROWS_A_PAIR
        return rows * self.data.sequence_length

    @property
    def sample_weight(self) -> int:
        """Largest weight of a sample in the mean of a step: 1 for a pair, otherwise its number of tokens."""
        return self.data.sequence_length if self.pair_settings is None else 1


RULES: Final = (
    *RULES_OF_OWN_TASK,
    *RULES_OF_STEPS,
    *RULES_OF_OPTIMIZATION,
    *RULES_OF_PRETRAIN,
    *RULES_OF_TOKENIZER,
    *RULES_OF_SFT,
    *RULES_OF_TWO_STAGE_KL,
    *RULES_OF_PREFERENCE,
    *RULES_OF_LATENT_EDIT,
    *RULES_OF_OBSERVING,
    *RULES_OF_ALL,
)

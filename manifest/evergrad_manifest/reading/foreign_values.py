"""Values of fields in other trainers, each with the reason why it is not possible here, and the
replacement."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import fold

WHY_LENGTH_IS_WRITTEN: Final = (
    "it decides which tokens are a sample, and must not change where the model's file does"
)


@dataclass(frozen=True)
class ForeignValue:
    """Values that a field has in other trainers, with the reason why it does not have them here, and the
    replacement."""

    key: str
    """The end of the field's path, long enough to match no other field."""
    values: tuple[str, ...]
    """Texts, in which ``*`` matches any text."""
    why: str
    remedy: str


FOREIGN_VALUES: Final = (
    ForeignValue(
        "microBatchSize",
        ("auto", "-1"),
        "it cuts a step into the slots whose sums make the gradient, and one that each machine found out for "
        "itself would make a run another one on each",
        "Write the number that `evergrad preflight` names as the largest one that fits",
    ),
    ForeignValue(
        "device",
        ("mps", "metal"),
        "torch.distributed exchanges no tensors of Apple's GPUs, and a run must be able to grow beyond one "
        "process",
        "Write cpu on such a machine, or leave it out",
    ),
    ForeignValue(
        "precision",
        ("fp8", "float8", "fp8-hybrid"),
        "training in fp8 needs kernels of a package other than torch, which the trainer does not have",
        "Write bf16-autocast",
    ),
    ForeignValue(
        "precision",
        ("fp16", "float16", "half", "fp16-mixed", "16-mixed"),
        "weights in fp16 would lose most updates; what is trained stays in fp32, and products are in fp16",
        "Write fp16-autocast, or bf16-autocast, which needs no scale of the loss",
    ),
    ForeignValue(
        "optimizer.type",
        ("*:*",),
        "an optimizer's state is saved, given to newcomers and cut in parts by its names, and its update has "
        "to give the same bits on any number of processes: both are shown for those that have a name",
        "Write one of them; `groups` has rates and decays for parts of the model",
    ),
    ForeignValue(
        "optimizer.type",
        ("*8bit", "*4bit", "*_bnb", "*_fp8"),
        "such moments have a scale for each block of a tensor, and the blocks follow from how it is cut: "
        "another number of processes would give other bits; their kernels are in packages other than torch",
        "Write adafactor, which keeps less, or set runtime.precision: bf16, whose moments are bf16",
    ),
    ForeignValue(
        "training.recipe",
        ("ppo", "grpo", "rloo", "reinforce*", "online_dpo"),
        "it learns from what the model itself generates between steps, and the data of a run are fixed "
        "before its first step",
        "Write preference, which learns from pairs that are there, or module:attr of a task of your own",
    ),
    ForeignValue(
        "twoStageKl.stages",
        ("the list has more than *",),
        "there is one boundary, whose model is the reference of all that follows",
        "Write two stages; for a third, begin another run with the weights of this one (initFrom)",
    ),
    ForeignValue(
        "data.sequenceLength",
        ("auto", "model", "max"),
        WHY_LENGTH_IS_WRITTEN,
        "Write the number; `evergrad preflight` refuses one above the model's max_position_embeddings",
    ),
)


def say_foreign_value(path: FieldPath, value: str) -> tuple[str, str] | None:
    """Return why the field at ``path`` cannot have ``value``, and the replacement, if it is a value from
    other trainers. Otherwise return None."""
    where = f".{format_path(path)}"
    for one in FOREIGN_VALUES:
        if where.endswith(f".{one.key}") and any(
            fnmatchcase(fold(value), fold(pattern)) for pattern in one.values
        ):
            return one.why, one.remedy
    return None

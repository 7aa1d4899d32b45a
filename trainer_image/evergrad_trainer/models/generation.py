"""``generation_config.json`` of an exported model: with what a server begins, ends and fills up a text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION_FILE: Final = "generation_config.json"
_END: Final = "eos_token_id"


@dataclass(frozen=True)
class TextIds:
    """Ids of a run's tokenizer. ``ends``: those that the model has learned to end a text with.

    ``given``: the configuration that the file has. An id in it goes before the tokenizer's.
    """

    ends: tuple[int, ...]
    begin: int | None = None
    filling: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


def set_ids(model: "PreTrainedModel", ids: TextIds) -> None:
    """Give a model that was created here the ids of its tokenizer, in place of its architecture's defaults.

    ``pad_token_id`` of the model's configuration stays: a row of its table would get no gradients in a later
    training.
    """
    given = ids.given
    ends = add_ends(given.get(_END), ids.ends)
    begin = given.get("bos_token_id", ids.begin)
    filling = given.get("pad_token_id", ids.filling)
    model.config.eos_token_id = ends
    model.config.bos_token_id = begin
    settings: Any = model.generation_config
    if settings is not None:
        settings.eos_token_id, settings.bos_token_id = ends, begin
        # Shorter texts of a batch are filled up with it; an architecture's default is an ordinary token here.
        settings.pad_token_id = ids.ends[0] if filling is None else filling


def add_ends(before: int | Sequence[int] | None, ends: Sequence[int]) -> int | list[int]:
    """``before`` with each of ``ends`` that is not in it: one id, or a list of several."""
    found = [] if before is None else [before] if isinstance(before, int) else [*before]
    found += [one for one in ends if one not in found]
    return found[0] if len(found) == 1 else found


def keep_settings(base: Path, directory: Path, ends: Sequence[int]) -> None:
    """Write the settings that ``base`` has into ``directory``, with all the ends that were learned.

    Without a file in ``base``, one that is in ``directory`` already gets the ends. Raises ModelError.
    """
    source = base / GENERATION_FILE
    if not source.is_file():
        source = directory / GENERATION_FILE
    if not source.is_file():
        return
    try:
        settings = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = "Copy the file again, or remove it"
        raise ModelError(
            Problem(str(source), "cannot be read", str(error), remedy)
        ) from error
    settings[_END] = add_ends(settings.get(_END), ends)
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    (directory / GENERATION_FILE).write_text(f"{text}\n", encoding="utf-8")

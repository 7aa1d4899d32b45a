"""``generation_config.json`` of an exported model: with what a server begins, ends and fills up a text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION_FILE: Final = "generation_config.json"
END: Final = "eos_token_id"


@dataclass(frozen=True)
class TextIds:
    """Ids of a run's texts. ``ends``: those at which a server stops. ``filling``: fills up shorter texts.

    ``given``: the configuration that the file has. An id in it goes before the tokenizer's.
    """

    ends: tuple[int, ...]
    filling: int
    begin: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


def set_ids(model: "PreTrainedModel", ids: TextIds) -> None:
    """Give a model that was created here the ids of its tokenizer, in place of its architecture's defaults.

    ``pad_token_id`` of the model's configuration stays: a row of its table would get no gradients in a later
    training.
    """
    given = ids.given
    ends = add_ends(given.get(END), ids.ends)
    begin = given.get("bos_token_id", ids.begin)
    filling = given.get("pad_token_id")
    model.config.eos_token_id = ends
    model.config.bos_token_id = begin
    settings: Any = model.generation_config
    if settings is not None:
        settings.eos_token_id, settings.bos_token_id = ends, begin
        # Shorter texts of a batch are filled up with it; an architecture's default is an ordinary token here.
        settings.pad_token_id = ids.filling if filling is None else filling


def add_ends(before: int | Sequence[int] | None, ends: Sequence[int]) -> int | list[int]:
    """``before`` with each of ``ends`` that is not in it: one id, or a list of several."""
    found = [] if before is None else [before] if isinstance(before, int) else [*before]
    found += [one for one in ends if one not in found]
    return found[0] if len(found) == 1 else found


def read_settings(directory: Path) -> dict[str, Any] | None:
    """The settings of generation in a directory; None if it has none. Raises ModelError."""
    path = directory / GENERATION_FILE
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise TypeError("it is not an object")
    except (OSError, ValueError, TypeError) as error:
        remedy = "Copy the file again, or remove it"
        raise ModelError(
            Problem(str(path), "cannot be read", str(error), remedy)
        ) from error
    return settings


def keep_settings(base: Path, directory: Path, ends: Sequence[int]) -> None:
    """Write the settings that ``base`` has into ``directory``, with all of ``ends``.

    Without a file in ``base``, one that is in ``directory`` already gets the ends. Raises ModelError.
    """
    settings = read_settings(base)
    if settings is None:
        settings = read_settings(directory)
    if settings is None:
        return
    settings[END] = add_ends(settings.get(END), ends)
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    (directory / GENERATION_FILE).write_text(f"{text}\n", encoding="utf-8")

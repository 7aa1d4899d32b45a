"""``generation_config.json`` of an exported model: the ids with which a server starts, ends and pads text."""

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
    """The special ids of a run's texts.

    ``ends``: ids at which a server stops. ``filling``: id that pads shorter texts. ``given``: the
    configuration in the manifest. An id in it takes precedence over the id of the tokenizer.
    """

    ends: tuple[int, ...]
    filling: int
    begin: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


def set_ids(model: "PreTrainedModel", ids: TextIds) -> None:
    """Replace the default ids of a model that Evergrad created with the ids of its tokenizer.

    ``pad_token_id`` of the model's configuration is not changed: otherwise a row of the embeddings would get
    no gradients in a later run.
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
        # Generation pads shorter texts of a batch with this id. The default id of the architecture may be an
        # ordinary token of this tokenizer.
        settings.pad_token_id = ids.filling if filling is None else filling


def add_ends(before: int | Sequence[int] | None, ends: Sequence[int]) -> int | list[int]:
    """Return ``before`` with each missing id of ``ends`` added. The result is one id, or a list of several.

    For example, ``add_ends(2, [2, 7])`` returns ``[2, 7]``.
    """
    found = [] if before is None else [before] if isinstance(before, int) else [*before]
    found += [one for one in ends if one not in found]
    return found[0] if len(found) == 1 else found


def read_settings(directory: Path) -> dict[str, Any] | None:
    """Return the generation settings in a directory, or None.

    Raises ModelError if the file cannot be read.
    """
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
    """Write the generation settings of ``base`` to ``directory``, with all ids of ``ends`` added.

    If ``base`` has no such file, the ids are added to the file in ``directory``, if it exists. Raises
    ModelError if a file cannot be read.
    """
    settings = read_settings(base)
    if settings is None:
        settings = read_settings(directory)
    if settings is None:
        return
    settings[END] = add_ends(settings.get(END), ends)
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    (directory / GENERATION_FILE).write_text(f"{text}\n", encoding="utf-8")

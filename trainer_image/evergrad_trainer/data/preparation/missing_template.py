"""Conversations without a chat template: a mistake of the manifest, which every row would repeat."""

import contextlib
import io
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.documents import LineCounts
from evergrad_trainer.data.preparation.files import (
    SourceEntry,
    evaluation_sources,
    find_files,
    training_sources,
)
from evergrad_trainer.data.preparation.json_values import parse_json
from evergrad_trainer.data.preparation.pairs import PairFormat
from evergrad_trainer.data.preparation.parquet import find_row_groups, read_objects
from evergrad_trainer.data.preparation.row_format import TEMPLATE_FIELD, row_format
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.preparation.unpacking import open_content

EXAMPLE: Final = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template that works with every tokenizer that has a token for the end of a text, as that of bytes has."""
_LONGEST_ROW: Final = 2**20
"""Bytes of a first row that are read at most: a longer one is left to the preparation."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def template_problem(place: str) -> Problem:
    """The problem of conversations for which there is no template. ``place``: of the first of them."""
    what = f"missing, and {place} is a conversation"
    why = "a chat template makes a text of it, and the tokenizer has none"
    remedy = f'Set it, for example to "{EXAMPLE}", or use a tokenizer that has a template'
    return Problem(TEMPLATE_FIELD, what, why, remedy)


def find_missing_template(training: Training, base_directory: Path) -> Problem | None:
    """Report a first row of a file that is a conversation, if there is no chat template for it.

    Looks only at files that exist on this machine, and leaves every other mistake in them to the preparation.
    Raises DataError for a template that is not valid.
    """
    rows, tokenizer = training.row_settings, training.tokenizer.path
    if rows is None:
        return None
    if (
        rows.chat_template is None
        and tokenizer is not None
        and not (base_directory / tokenizer).exists()
    ):
        # The tokenizer exists on the cluster alone, and may have a template.
        return None
    form = row_format(training, base_directory)
    if form is None or form.has_template:
        return None

    for source in (
        *training_sources(training, base_directory),
        *evaluation_sources(training, base_directory),
    ):
        files, problems = find_files(source)
        if problems:
            continue
        first = files[0]
        # A damaged file, or a format that cannot be read here, has a message of its own in the preparation.
        with contextlib.suppress(DataError, OSError, ValueError):
            row = _first_row(source, first, form)
            if isinstance(row, dict) and form.is_conversation(row):
                return template_problem(f"the first {source.unit} of {first}")
    return None


def _first_row(source: SourceEntry, path: Path, form: RowFormat | PairFormat) -> Any:
    """Return the first row of a file, a JSON value; None if it has none. Raises what reading raises."""
    if source.type == "parquet":
        found: list[dict[str, Any]] = []

        def keep(row: dict[str, Any]) -> str:
            found.append(row)
            return ""

        if not find_row_groups(path, form.keys):
            return None
        batches = read_objects(
            path, range(1), form.keys, first_row=1, tally=LineCounts(), render=keep
        )
        next(batches, None)
        return found[0] if found else None
    with io.BufferedReader(open_content(path)) as file:
        line = file.readline(_LONGEST_ROW)
    text = line.removeprefix(_BYTE_ORDER_MARK).decode().strip()
    return parse_json(text) if text else None

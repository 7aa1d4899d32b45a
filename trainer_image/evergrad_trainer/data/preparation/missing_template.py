"""Detects conversations without a chat template, an error in the manifest that would affect every row."""

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
"""A template for every tokenizer that has a token for the end of a text, for example the byte tokenizer."""
_LONGEST_ROW: Final = 2**20
"""Maximum bytes of a first row. A longer row is checked only by the preparation."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def template_problem(place: str) -> Problem:
    """Return the problem of conversations without a template. ``place``: the place of the first one."""
    what = f"missing, and {place} is a conversation"
    why = "a chat template makes a text of it, and the tokenizer has none"
    remedy = f'Set it, for example to "{EXAMPLE}", or use a tokenizer that has a template'
    return Problem(TEMPLATE_FIELD, what, why, remedy)


def find_missing_template(training: Training, base_directory: Path) -> Problem | None:
    """Return a problem if the first row of a source is a conversation and there is no chat template.

    Checks only files that exist on this machine. Other errors in the files are reported by the preparation.
    Raises DataError if a template is not valid.
    """
    rows, tokenizer = training.row_settings, training.tokenizer.path
    if rows is None:
        return None
    if (
        rows.chat_template is None
        and tokenizer is not None
        and not (base_directory / tokenizer).exists()
    ):
        # The tokenizer exists only on the cluster, and may have a template.
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
        # The preparation reports damaged files and formats that cannot be read here.
        with contextlib.suppress(DataError, OSError, ValueError):
            row = _first_row(source, first, form)
            if isinstance(row, dict) and form.is_conversation(row):
                return template_problem(f"the first {source.unit} of {first}")
    return None


def _first_row(source: SourceEntry, path: Path, form: RowFormat | PairFormat) -> Any:
    """Return the first row of a file as a JSON value; None if it has no rows.

    Raises DataError, OSError or ValueError if the row cannot be read.
    """
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

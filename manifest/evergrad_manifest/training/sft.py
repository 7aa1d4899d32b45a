"""The recipe ``sft``: supervised fine-tuning on rows of chat messages, or of prompts and completions."""

import datetime
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import PREFERENCE, RECIPES, TRAINING, reads_pairs
from evergrad_manifest.values.numbers import Count

SFT: Final = "sft"
KEEPS_APART: Final = ("pretrain", SFT)
"""Recipes whose loss keeps the documents of a sample apart. With other recipes, documents would attend to
each other."""
GENERATED: Final = "-generated"
"""Suffix of the name of an evaluation set that generates from the rows of another set."""
NUMBERS: Final = ("exact_match", "parse_rate", "rmse")
"""Metrics of generated completions, in addition to the loss."""
_ROWS: Final = f"{TRAINING}.rows"
_TOO_LONG: Final = f"{_ROWS}.tooLong"
_GENERATION: Final = f"{TRAINING}.evaluation.generation"
_PACKING: Final = f"{TRAINING}.data.packing"
_EVALUATION_SOURCES: Final = f"{TRAINING}.evaluation.sources"
_SOURCES: Final = f"{TRAINING}.data.sources"

MESSAGES: Final = "messages"
CONVERSATIONS: Final = "conversations"
"""Key of a conversation in rows of ShareGPT and of tools with the same format."""
FieldName = Annotated[str, Field(min_length=1, max_length=200)]


class RowSettings(Section):
    """How rows are read by the recipe ``sft``. Each row is one JSON object, or one of a Parquet file: a
    conversation or a prompt with its completion."""

    chat_template: str | None = Field(default=None, min_length=1, max_length=2**17)
    """Jinja template that converts a conversation to a text, as a tokenizer's ``chat_template``. Default: the
    tokenizer's template."""
    date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Day (YYYY-MM-DD) that a chat template gets as the current date. Default: none, and a template that
    needs a date is refused."""
    messages_field: FieldName = MESSAGES
    """Key of a conversation: a list of objects with ``role`` and ``content``, or with ``from`` and ``value``.
    If you keep the default, a row can have ``conversations`` instead."""
    prompt_field: FieldName = "prompt"
    """Key of a prompt, a text that is not learned."""
    completion_field: FieldName = "completion"
    """Key of the text after the prompt. It is learned, with the end of the document after it."""
    learn: Literal["completions", "everything"] = "completions"
    """Tokens that have a loss. ``completions``: assistant turns and completions. ``everything``: prompts as
    well."""
    too_long: Literal["refuse", "skip", "truncate"] = "refuse"
    """What happens if a row has more than ``sequenceLength`` + 1 tokens. ``refuse``: the run stops. ``skip``:
    the row is left out. ``truncate``: the end of the row is cut off."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys that define a row."""
        named = (self.messages_field, self.prompt_field, self.completion_field)
        if self.messages_field != MESSAGES or CONVERSATIONS in named:
            return named
        return (*named, CONVERSATIONS)


class Generation(Section):
    """Completions that the model generates from the prompts of each set, compared with the rows' own."""

    max_new_tokens: Count = Field(default=100, ge=1, le=2**16)
    """Maximum number of tokens that are generated for each row."""
    stop: tuple[str, ...] = Field(default=(), max_length=16)
    """Texts at which a completion ends. They are not part of the completion. A completion also ends at each
    id that an export of the run names as an end: the end of the document, the template's end of a turn, and
    the ends of the base model."""


def _reads_rows(view: View) -> bool:
    """Return whether samples are rows: because of the recipe, or because a custom task has the section."""
    recipe = view.get(f"{TRAINING}.recipe")
    is_own = recipe not in RECIPES and view.is_given(_ROWS)
    return recipe == SFT or is_own or reads_pairs(view)


def check_sft(view: View) -> Iterator[Problem]:
    """Check that settings of rows are set only for a recipe that reads rows."""
    recipe = view.get(f"{TRAINING}.recipe")
    if recipe is UNKNOWN or recipe not in RECIPES or recipe == SFT:
        return
    refused = {_ROWS: "its samples are not rows", _GENERATION: "it has no prompts"}
    if recipe == PREFERENCE:
        refused = {_GENERATION: "its rows have two completions each"}
    for path, why in refused.items():
        if view.is_given(path):
            remedy = f"Remove it, or set recipe: {SFT}"
            yield Problem(path, f"has no meaning with recipe {recipe}", why, remedy)


def check_fields(view: View) -> Iterator[Problem]:
    """Check that no key is used for two parts of a row."""
    names = ("messagesField", "promptField", "completionField")
    if view.get(_ROWS) is UNKNOWN or view.get(_ROWS) is None:
        return
    first: dict[str, str] = {}
    for name in names:
        value = view.get(f"{_ROWS}.{name}")
        if value is UNKNOWN:
            continue
        if value in first:
            what = f"{value!r} is also {first[value]}"
            why = "each names another part of a row"
            yield Problem(f"{_ROWS}.{name}", what, why, "Name two different keys")
        first[value] = name


def check_date(view: View) -> Iterator[Problem]:
    """Check that the date for templates is a valid date."""
    value = view.get(f"{_ROWS}.date")
    if not isinstance(value, str):
        return
    try:
        datetime.date.fromisoformat(value)
    except ValueError:
        why = "a template could not write it"
        remedy = "Give year, month and day, such as 2025-06-01"
        yield Problem(f"{_ROWS}.date", f"{value!r} is not a day", why, remedy)


def check_rows(view: View) -> Iterator[Problem]:
    """Check that rows are JSON objects, one in each line, or rows of a Parquet file."""
    if not _reads_rows(view):
        return
    has_pairs = reads_pairs(view)
    recipe = PREFERENCE if has_pairs else SFT
    for where in (_SOURCES, _EVALUATION_SOURCES):
        for path, item in view.items(where):
            if item["type"] not in ("jsonl", "parquet", UNKNOWN):
                yield Problem(
                    format_path((*path, "type")),
                    f"{item['type']} has no rows of messages or prompts",
                    f"recipe {recipe} reads JSON objects, one per line, or the rows of Parquet files",
                    "Write the rows so, and set type: jsonl or parquet",
                )
            elif item["textField"] not in ("text", UNKNOWN):
                # The resolved file of a run contains the default.
                why = "a row has messages, or a prompt and a completion"
                remedy = (
                    f"Remove it; {_ROWS} has messagesField, promptField and completionField"
                )
                if has_pairs:
                    why = "a row has a prompt and two completions"
                    remedy = (
                        f"Remove it; {TRAINING}.{recipe} has chosenField and rejectedField"
                    )
                where_field = format_path((*path, "textField"))
                yield Problem(
                    where_field, f"has no meaning with recipe {recipe}", why, remedy
                )


def check_packing(view: View) -> Iterator[Problem]:
    """Check that the packing is possible for texts or rows."""
    found = view.known(f"{TRAINING}.recipe", _PACKING, f"{TRAINING}.runtime.attention")
    if found is None or reads_pairs(view):
        return
    recipe, packing, attention = found
    reads_rows = _reads_rows(view)
    if not view.is_given(_PACKING):
        packing = "documents" if reads_rows else packing
    if reads_rows and packing == "concatenate":
        why = "a row would be cut wherever a sample ends, and see the rows before it"
        remedy = "Use documents, or none"
        yield Problem(_PACKING, "concatenate is not for rows", why, remedy)
    if recipe in RECIPES and not reads_rows and packing == "none":
        why = "they are cut into samples, so that each sample is full"
        remedy = "Use concatenate, or documents"
        yield Problem(_PACKING, "none is not for texts", why, remedy)
    if recipe in RECIPES and recipe not in KEEPS_APART and packing == "documents":
        why = f"only {' and '.join(KEEPS_APART)} keep the documents of a sample apart"
        what = f"documents is not for recipe {recipe}"
        yield Problem(_PACKING, what, why, "Use concatenate")
    if packing == "documents" and attention in ("flash", "cudnn"):
        why = "torch's kernel of that name takes no mask, which keeps the documents of a sample apart"
        remedy = "Leave it out, or use efficient or math"
        yield Problem(
            f"{TRAINING}.runtime.attention",
            f"{attention} cannot be combined with data.packing documents",
            why,
            remedy,
        )


def check_generation(view: View) -> Iterator[Problem]:
    """Check that the names of generated sets are not used otherwise, and that there are whole completions to
    compare."""
    if view.get(f"{TRAINING}.evaluation") is UNKNOWN or not view.is_given(_GENERATION):
        return
    if any(not text for text in view.raw(*_GENERATION.split("."), "stop") or ()):
        why = "every text has it everywhere"
        yield Problem(
            f"{_GENERATION}.stop", "an empty text cannot mark an end", why, "Remove it"
        )
    if view.get(_TOO_LONG) == "truncate":
        yield Problem(
            _TOO_LONG,
            "truncate cannot be combined with evaluation.generation",
            "what is generated would be compared with completions whose end is cut off",
            "Use skip or refuse, or leave evaluation.generation out",
        )
    sources = view.items(_EVALUATION_SOURCES)
    if view.get(f"{TRAINING}.recipe") == SFT and not (
        sources or view.is_given(f"{TRAINING}.data.heldOut")
    ):
        why = "neither evaluation.sources nor data.heldOut is set"
        remedy = (
            "Add data.heldOut (such as `fraction: 1%`) or a source under evaluation.sources"
        )
        yield Problem(_GENERATION, "there is nothing to generate from", why, remedy)
    for path, item in sources:
        if isinstance(item["name"], str) and item["name"].endswith(GENERATED):
            why = "names that end so are those of the sets that generate"
            where = format_path((*path, "name"))
            yield Problem(where, f"{item['name']!r} is reserved", why, "Rename the source")


RULES: Final = (
    check_sft,
    check_fields,
    check_date,
    check_rows,
    check_packing,
    check_generation,
)

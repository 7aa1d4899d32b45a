"""How a manifest's rows are read: its fields, and the chat template, its own or the tokenizer's."""

import json
from pathlib import Path
from typing import Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.data.chat_template import (
    TEMPLATE_FILE,
    ChatTemplateError,
    check_template,
)
from evergrad_trainer.data.preparation.pairs import PairFormat
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.tokenizers import BYTE_END_TOKEN
from evergrad_trainer.errors import DataError

_FIELD: Final = "spec.training.rows.chatTemplate"
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
)


def row_format(training: Training, base_directory: Path) -> RowFormat | PairFormat | None:
    """How rows are read; None where the documents of the file are texts.

    Raises DataError for a template that is none.
    """
    rows = training.row_settings
    if rows is None:
        return None
    template, variables = rows.chat_template, {"eos_token": BYTE_END_TOKEN}
    where = _FIELD
    if training.tokenizer.path is not None:
        directory = base_directory / training.tokenizer.path
        own, variables = _of_tokenizer(directory)
        if template is None:
            template, where = own, f"the chat template in {directory}"
    if template is not None:
        try:
            check_template(template)
        except ChatTemplateError as error:
            raise DataError(
                Problem(where, "is no jinja template", str(error), "Correct it")
            ) from None
    form = RowFormat(
        messages_field=rows.messages_field,
        prompt_field=rows.prompt_field,
        completion_field=rows.completion_field,
        longest=training.data.sequence_length + 1,
        too_long=rows.too_long,
        template=template,
        variables=tuple(sorted(variables.items())),
    )
    pairs = training.pair_settings
    if pairs is None:
        return form
    return PairFormat(
        form, chosen_field=pairs.chosen_field, rejected_field=pairs.rejected_field
    )


def _of_tokenizer(directory: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a tokenizer's directory, if it has one, and its special tokens by name."""
    # Some versions name the special tokens in a file of their own, which others do not write.
    configs = []
    for name in (_SPECIAL_TOKENS, _CONFIG):
        path = directory / name
        try:
            value = json.loads(_read(path)) if path.is_file() else {}
        except ValueError as error:
            what, remedy = "is not valid JSON", "Copy the file again"
            raise DataError(Problem(str(path), what, str(error), remedy)) from error
        configs.append(value if isinstance(value, dict) else {})
    variables = {}
    for name in _TOKENS:
        for config in configs:
            # Either a text or an object with the text in it, by the version that saved it.
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token

    # A file of its own is what newer versions write; several named templates are what some older ones hold.
    own = directory / TEMPLATE_FILE
    if own.is_file():
        return _read(own), variables
    template = configs[-1].get("chat_template")
    if isinstance(template, list):
        named = {
            one.get("name"): one.get("template")
            for one in template
            if isinstance(one, dict)
        }
        template = named.get("default")
    return (template if isinstance(template, str) else None), variables


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Copy the file again, and check its rights"
        raise DataError(Problem(str(path), "cannot be read", str(error), remedy)) from error

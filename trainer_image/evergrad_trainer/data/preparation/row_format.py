"""Determines how the rows of a manifest are read: the fields, and the chat template.

The template comes from the manifest or from the tokenizer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.chat_template import (
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    ChatTemplateError,
    check_template,
)
from evergrad_trainer.data.preparation.pairs import PairFormat
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.tokenizers import BYTE_END_TOKEN

TEMPLATE_FIELD: Final = "spec.training.rows.chatTemplate"
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
OTHER_SAMPLES: Final = "the same rows would become other samples"
_TEMPLATES: Final = "chat template"
_SPECIAL_TOKEN_TEXTS: Final = "special tokens"
_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
"""Name of the template that transformers uses for a conversation with tools, if it exists."""
_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
)


def row_format(training: Training, base_directory: Path) -> RowFormat | PairFormat | None:
    """Return how rows are read; None if the documents are plain texts.

    Raises DataError if a template is not valid.
    """
    rows = training.row_settings
    if rows is None:
        return None
    where, variables = TEMPLATE_FIELD, {"eos_token": BYTE_END_TOKEN}
    templates: Mapping[str, str] = {}
    if training.tokenizer.path is not None:
        directory = base_directory / training.tokenizer.path
        where = f"the chat template in {directory}"
        templates, variables = _of_tokenizer(directory)
    if rows.chat_template is not None:
        # Use this template for all conversations, like the argument of apply_chat_template in transformers.
        where, templates = TEMPLATE_FIELD, {_DEFAULT: rows.chat_template}
    for name, template in templates.items():
        try:
            check_template(template)
        except ChatTemplateError as error:
            shown = where if name == _DEFAULT else f"{where} ({name})"
            raise DataError(
                Problem(shown, "is not a jinja template", str(error), "Correct it")
            ) from None
    form = RowFormat(
        messages_field=rows.messages_field,
        prompt_field=rows.prompt_field,
        completion_field=rows.completion_field,
        longest=training.data.sequence_length + 1,
        too_long=rows.too_long,
        template=templates.get(_DEFAULT),
        variables=tuple(sorted(variables.items())),
        tool_template=templates.get(_WITH_TOOLS),
        date=rows.date,
    )
    pairs = training.pair_settings
    if pairs is None:
        return form
    return PairFormat(
        form, chosen_field=pairs.chosen_field, rejected_field=pairs.rejected_field
    )


def identify_texts(training: Training, base_directory: Path) -> dict[str, str]:
    """Return a hash of each text that rows use from the tokenizer's directory, keyed by the kind of text.

    The identity of a tokenizer does not include these texts.
    """
    rows, path = training.row_settings, training.tokenizer.path
    if rows is None or path is None:
        return {}
    templates, variables = _of_tokenizer(base_directory / path)
    texts = {_SPECIAL_TOKEN_TEXTS: variables}
    if rows.chat_template is None:
        texts[_TEMPLATES] = templates
    return {
        what: xxhash.xxh3_128_hexdigest(json.dumps(one, sort_keys=True).encode())
        for what, one in texts.items()
    }


def find_changed_texts(
    recorded: Mapping[str, str], training: Training, base_directory: Path
) -> list[Problem]:
    """Return a problem for each text that differs from the recorded text.

    ``recorded``: the result of :func:`identify_texts` at the start of the run; empty if an older version
    started the run.
    """
    directory = base_directory / (training.tokenizer.path or "")
    files = {
        _TEMPLATES: (TEMPLATE_FILE, TEMPLATE_FOLDER),
        _SPECIAL_TOKEN_TEXTS: (_CONFIG, _SPECIAL_TOKENS),
    }
    problems = []
    for what, now in identify_texts(training, base_directory).items():
        if now == recorded.get(what, now):
            continue
        found = [directory / name for name in files[what] if (directory / name).exists()]
        places = ", ".join(map(str, found or [directory / _CONFIG]))
        remedy = "Restore the files to continue this run, or train under another run name"
        problems.append(
            Problem(
                places,
                f"the {what} changed since this run was prepared",
                OTHER_SAMPLES,
                remedy,
            )
        )
    return problems


def _of_tokenizer(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates for rows and the special tokens of a tokenizer's directory, both by name."""
    # Some versions write the special tokens to a separate file, and other versions do not.
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
            # The token is a text or an object that contains the text, depending on the version that saved it.
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token

    # Newer versions write templates to separate files. Older versions store one template, or several by name,
    # in tokenizer_config.json.
    files = {path.stem: path for path in (directory / TEMPLATE_FOLDER).glob("*.jinja")}
    if (own := directory / TEMPLATE_FILE).is_file():
        files.setdefault(_DEFAULT, own)
    templates: Any = {name: _read(path) for name, path in files.items()}
    if not files:
        templates = configs[-1].get("chat_template")
    if isinstance(templates, list):
        templates = {
            one.get("name"): one.get("template")
            for one in templates
            if isinstance(one, dict)
        }
    elif not isinstance(templates, dict):
        templates = {_DEFAULT: templates}
    wanted = {name: templates.get(name) for name in (_DEFAULT, _WITH_TOOLS)}
    return {name: text for name, text in wanted.items() if isinstance(text, str)}, variables


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Copy the file again, and check its rights"
        raise DataError(Problem(str(path), "cannot be read", str(error), remedy)) from error

"""Compares texts and marks of published chat templates with transformers: python
tools/benchmarks/chat_templates.py

Downloads the templates of trl (with pip, into a temporary folder; none is kept here), and renders eleven
conversations with each of them, with Evergrad and with transformers. If both produce a text, the texts must
be equal, or the reason is shown. The turns that Evergrad marks in a published template are compared with the
turns that transformers marks in trl's training form of the template.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.marked_text import MarkedText
from evergrad_trainer.data.preparation.documents import RowError
from evergrad_trainer.data.preparation.rows import RowFormat

VERSION: Final = "1.16.0"
_SPECIAL: Final = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}


def _said(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_CALL: Final = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "look_up", "arguments": {"city": "Paris"}},
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city"}},
            "required": ["city"],
        },
    },
}
_ANSWER: Final = {"name": "look_up", "tool_call_id": "abcdefghi"}
_HI: Final = [_said("user", "hi there"), _said("assistant", "the answer")]
CONVERSATIONS: Final[dict[str, dict[str, Any]]] = {
    "one turn": {"messages": _HI},
    "two turns": {
        "messages": [*_HI, _said("user", "and then?"), _said("assistant", "the dog")]
    },
    "system": {
        "messages": [
            _said("system", "Be short."),
            _said("user", "hi"),
            _said("assistant", "é 😀 <b>&"),
        ]
    },
    "reasoning": {
        "messages": [
            _said("user", "2+2"),
            _said("assistant", "4", reasoning_content="two and two"),
        ]
    },
    "thinking, two turns": {
        "messages": [
            _said("user", "2+2"),
            _said("assistant", "four", thinking="two and two"),
            _said("user", "3+3"),
            _said("assistant", "six", thinking="three and three"),
        ]
    },
    "tool call": {
        "messages": [
            _said("user", "weather in Paris?"),
            _said("assistant", "", tool_calls=[_CALL]),
            _said("tool", "12.5", **_ANSWER),
            _said("assistant", "12.5 degrees"),
        ],
        "tools": [_TOOL],
    },
    "tool call, content null": {
        "messages": [
            _said("user", "weather in Paris?"),
            _said("assistant", None, tool_calls=[_CALL]),
            _said("tool", "12.5", **_ANSWER),
            _said("assistant", "12.5 degrees"),
        ]
    },
    "tool call, content missing": {
        "messages": [
            _said("user", "weather in Paris?"),
            {"role": "assistant", "tool_calls": [_CALL]},
            _said("tool", "12.5", **_ANSWER),
            _said("assistant", "12.5 degrees"),
        ]
    },
    "keys that are null": {
        "messages": [
            _said("user", "hi", name=None, tool_calls=None),
            _said("assistant", "hello", tool_calls=None, reasoning_content=None),
        ]
    },
    "parts": {
        "messages": [
            _said(
                "user", [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
            ),
            _said("assistant", [{"type": "text", "text": "the answer"}]),
        ]
    },
    "from and value": {
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "hi there"},
            {"from": "gpt", "value": "the answer"},
        ]
    },
}


@dataclass(frozen=True)
class Result:
    """Both results for a conversation. ``theirs`` and ``ours``: the text, or None if it was refused."""

    template: str
    conversation: str
    theirs: str | None
    ours: MarkedText | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Return the verdict in a few words."""
        if self.theirs is None:
            return "both refuse" if self.ours is None else "only evergrad renders"
        if self.ours is None:
            return "only transformers renders"
        return "same text" if str(self.ours) == self.theirs else "other text"


def fetch(folder: Path) -> dict[str, str]:
    """Return the templates of trl by name."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), f"trl=={VERSION}"], check=True)
    (wheel,) = folder.glob("trl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {
            Path(name).stem: archive.read(name).decode()
            for name in sorted(archive.namelist())
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja")
        }


def build_tokenizer() -> Any:
    """Return a byte-level tokenizer, which loses no character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, special=True) for one in _SPECIAL.values()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **_SPECIAL)


def plain(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages in the form that transformers accepts."""
    if "messages" in row:
        return list(row["messages"])
    roles = {"human": "user", "gpt": "assistant"}
    return [
        _said(roles.get(one["from"], one["from"]), one["value"])
        for one in row["conversations"]
    ]


def compare(name: str, source: str, tokenizer: Any, date: str) -> Iterator[Result]:
    """Yield the result of each conversation in both libraries."""
    variables = tuple(sorted(_SPECIAL.items()))
    form = RowFormat(
        "messages", "prompt", "completion", 10**6, "refuse", source, variables, date=date
    )
    for title, row in CONVERSATIONS.items():
        reason, theirs, ours = "", None, None
        try:
            theirs = tokenizer.apply_chat_template(
                plain(row), tools=row.get("tools"), chat_template=source, tokenize=False
            )
        except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
            reason = " ".join(str(error).split())[:160]
        try:
            ours = form.render(row)
        except (RowError, DataError) as error:
            why = getattr(error, "why", "")
            reason = f"{error}: {why}"[:260]
        yield Result(name, title, theirs, ours, reason)


def marked_by_training_form(source: str, row: dict[str, Any], tokenizer: Any) -> str | None:
    """Return the text that transformers marks, using the training form of a template."""
    try:
        found = tokenizer.apply_chat_template(
            plain(row),
            tools=row.get("tools"),
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception:  # noqa: BLE001 - as above
        return None
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return str(tokenizer.decode([one for one, mark in pairs if mark]))


def main() -> None:
    """Compare and print. Fails if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--templates", type=Path, help="a folder of *.jinja in the place of trl's"
    )
    parser.add_argument(
        "--show", action="store_true", help="show both texts where they differ"
    )
    parser.add_argument(
        "--marks", action="store_true", help="compare marks with trl's training forms"
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.templates is None:
        with tempfile.TemporaryDirectory() as folder:
            templates = fetch(Path(folder))
    else:
        files = sorted(arguments.templates.glob("*.jinja"))
        templates = {path.stem: path.read_text(encoding="utf-8") for path in files}

    # transformers writes today's date, so pass the same date to Evergrad.
    tokenizer, date = build_tokenizer(), datetime.datetime.now().date().isoformat()
    results = [
        result
        for name, source in templates.items()
        for result in compare(name, source, tokenizer, date)
    ]
    counts = Counter((one.conversation, one.verdict) for one in results)
    verdicts = sorted({one.verdict for one in results})
    print(
        f"{len(templates)} templates, transformers {transformers.__version__}, trl {VERSION}\n"
    )
    print("| conversation |", " | ".join(verdicts), "|")
    print("|---|" + "---:|" * len(verdicts))
    for title in CONVERSATIONS:
        print("|", title, "|", " | ".join(str(counts[title, one]) for one in verdicts), "|")
    print("\nReasons:")
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in results:
        if one.verdict != "same text":
            what = f"{one.verdict}: {one.reason or _difference(one)}"
            reasons.setdefault((one.conversation, what), []).append(one.template)
    for (title, what), names in sorted(reasons.items()):
        print(f"- {title}: {what}\n  {', '.join(names)}")
    if arguments.show:
        for one in results:
            if one.verdict == "other text":
                print(json.dumps([one.template, one.conversation, one.theirs, one.ours]))
    if arguments.marks:
        _show_marks(templates, results, tokenizer)


def _difference(result: Result) -> str:
    """Return the place where two texts begin to differ, or the text that only Evergrad has."""
    if result.theirs is None:
        return "transformers refuses it"
    pairs = zip(result.theirs, result.ours or "", strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    return f"{result.theirs[at : at + 60]!r} is {str(result.ours)[at : at + 60]!r}"


def _show_marks(templates: dict[str, str], results: list[Result], tokenizer: Any) -> None:
    counts: Counter[str] = Counter()
    print("\nMarks of stock templates next to transformers' in trl's training form:")
    for one in results:
        training = templates.get(f"{one.template}_training")
        if training is None or one.ours is None:
            continue
        row = CONVERSATIONS[one.conversation]
        expected = marked_by_training_form(training, row, tokenizer)
        if expected is None:
            continue
        marked = [one.ours[span.start : span.end] for span in one.ours.spans]
        # The prompt for a turn contains its beginning, such as a header or <think>, so remove it.
        rest, is_within = "".join(expected.split()), True
        for turn in marked:
            before, found, rest = rest.partition("".join(turn.split()))
            is_within = (
                is_within and bool(found) and not before.endswith("".join(turn.split()))
            )
        kind = "other"
        if "".join(marked) == expected:
            kind = "the same"
        elif "".join("".join(marked).split()) == "".join(expected.split()):
            kind = "the same but for white space"
        elif is_within and not rest:
            kind = "the same but for the beginning of turns, which their prompts have"
        counts[kind] += 1
        if kind == "other":
            print(f"- {one.template}, {one.conversation}: {marked!r} for {expected!r}")
    print(dict(counts))


if __name__ == "__main__":
    main()

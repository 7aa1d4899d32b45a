"""Chat templates: messages → text, and which parts of the text are the assistant's."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError, Undefined, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evergrad_trainer.data.chat_forms import (
    PROBE,
    SHORT,
    forms_of_content,
    is_shown,
    parts_of,
    replace_part,
    shows_contents,
    writes_parts,
)
from evergrad_trainer.data.chat_turns import TurnNotFoundError, find_plain_turn, find_turn
from evergrad_trainer.data.marked_text import MarkedSpan, MarkedText

ASSISTANT: Final = "assistant"
TEMPLATE_FILE: Final = "chat_template.jinja"
"""Name of the template in a tokenizer's directory."""
TEMPLATE_FOLDER: Final = "additional_chat_templates"
"""Folder in it with further templates, each named after its file."""
FOR_TEMPLATES: Final = ("tools", "documents")
"""Keys of a conversation that its template is given besides the messages."""
FIRST_RENDERING: Final = 1
"""In the texts of the first versions, keys that a conversation lacks were undefined, and ``tojson`` had fewer
arguments."""
FORMS_OF_CONTENT: Final = 3
"""Since this rule contents may be parts or missing, and turns are found in any template."""
RENDERING: Final = 3
"""Number of the rule by which conversations become text. Another rule needs another number: runs that an
earlier one began continue with its texts."""
_ADDRESS: Final = re.compile(r"<[^<>]* at 0x[0-9a-f]{4,16}>")
"""An object of Python as it is written out where it has no text of its own."""
_BEGIN: Final = "\ud800"
_END: Final = "\udfff"
"""Marks around what stands in a ``generation`` block: halves of surrogate pairs, which no text has."""


class ChatTemplateError(Exception):
    """A conversation that a template does not render, with its reason."""


class _Generation(Extension):
    """The block ``{% generation %}…{% endgeneration %}`` that templates put around assistant turns."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class DateNeededError(ChatTemplateError):
    """A template writes the date, and it was given none."""


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja template as tokenizers carry it.

    ``variables``: what it knows besides the messages, such as ``eos_token``. ``rendering``: number of the
    rule by which it makes texts, :data:`RENDERING` or an earlier one. ``date``: the day (YYYY-MM-DD) that
    ``strftime_now`` gives; without it templates have no such function.
    """

    source: str
    variables: tuple[tuple[str, str], ...] = ()
    rendering: int = RENDERING
    date: str | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        num_before: int = 0,
    ) -> MarkedText:
        """The text of a conversation, in which the assistant's turns behind ``num_before`` messages are
        marked.

        Marked is what the template's ``generation`` blocks hold. In the text of a template without them a
        turn is what follows the prompt for it: see :func:`find_turn`. Raises ChatTemplateError.
        """
        if self.rendering < FORMS_OF_CONTENT:
            return self._mark(messages, extra, num_before, self._text(messages, extra))
        messages, whole = self._choose_form(messages, extra)
        text = self._mark(messages, extra, num_before, whole)
        text.dropped = self._find_dropped(messages, extra, text)
        return text

    def _mark(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        num_before: int,
        whole: str,
    ) -> MarkedText:
        """``whole``, the text of the messages, with its turns marked."""
        if _BEGIN in whole:
            text = _unmark(whole)
            if not any(message["role"] == ASSISTANT for message in messages[:num_before]):
                return text
            # Blocks need not be one a turn: those of the turns before lie in the text of these.
            before = _unmark(self._text(messages[:num_before], extra))
            if not text.startswith(before):
                raise ChatTemplateError(
                    "the template does not render the conversation behind the text of its prompt, so that "
                    "the completion cannot be found"
                )
            behind = [span for span in text.spans if span.start >= len(before)]
            return MarkedText(str(text), behind)

        def render(some: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
            return self._text(some, extra, is_prompt=is_prompt)

        spans: list[MarkedSpan] = []
        end_token = dict(self.variables).get("eos_token", "")
        find = find_turn if self.rendering >= FORMS_OF_CONTENT else find_plain_turn
        try:
            for at, message in enumerate(messages):
                if message["role"] != ASSISTANT or at < num_before:
                    continue
                span = find(render, messages, at, whole, end_token=end_token)
                if spans and span.start < spans[-1].end:
                    raise TurnNotFoundError(at)
                spans.append(span)
        except TurnNotFoundError as error:
            raise ChatTemplateError(
                f"the template does not render message {error.at + 1} behind the prompt for it, so that its "
                "text cannot be found; it needs {% generation %} blocks around assistant turns, as the "
                "templates for training that come with trl have them (chat_templates/*_training.jinja)"
            ) from None
        return MarkedText(whole, tuple(spans))

    def _choose_form(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        """The messages in the first form that the template renders whole, and their text.

        The form that the row has comes first, which gives transformers' text. Some templates know contents
        that are texts, or lists of parts, or that are there, and leave out or write as Python what is none
        of these.
        """
        first: tuple[Sequence[Mapping[str, Any]], str] | None = None
        failed: ChatTemplateError | None = None
        for form in forms_of_content(messages):
            try:
                text = self._text(form, extra)
            except DateNeededError:
                raise
            except ChatTemplateError as error:
                failed = failed or error
                continue
            if shows_contents(form, text):
                return form, text
            # Written as Python, a list is no text of a conversation.
            if first is None and not writes_parts(form, text):
                first = form, text
        if first is not None:
            return first
        raise failed or ChatTemplateError(
            "the template writes contents that are parts as lists"
        )

    def _find_dropped(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], text: str
    ) -> frozenset[str]:
        """The kinds of parts of messages that the text lacks, by the names in ``PARTS``."""
        found = [
            (at, kind)
            for at, message in enumerate(messages)
            for kind, said in parts_of(message)
            if len(said.strip()) < SHORT or not is_shown(said, text)
        ]
        unsure = list(dict.fromkeys(found))
        # Templates also write a part in other words, as JSON or without its ends, and a short text stands in
        # many others: parts that stand out tell what is there. All at once, and one by one only where one is
        # missing, since a changed part may change what is made of another.
        if not unsure or self._shows_probes(messages, extra, unsure):
            return frozenset()
        dropped: set[str] = set()
        for at, kind in unsure:
            if kind not in dropped and not self._shows_probes(
                messages, extra, [(at, kind)]
            ):
                dropped.add(kind)
        return frozenset(dropped)

    def _shows_probes(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        places: Sequence[tuple[int, str]],
    ) -> bool:
        """Whether texts that stand out come out of the template, in the place of some parts of messages."""
        changed = list(messages)
        probes = [f"{PROBE}{number}{PROBE}" for number in range(len(places))]
        for (at, kind), probe in zip(places, probes, strict=True):
            changed[at] = replace_part(changed[at], kind, probe)
        try:
            text = self._text(changed, extra)
        except ChatTemplateError:
            # It reads the part, and refuses this one.
            return len(places) == 1
        return all(probe in text for probe in probes)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        is_prompt: bool = False,
    ) -> str:
        # As transformers gives them: None where a conversation has none, which is not undefined.
        values = {
            **dict.fromkeys(FOR_TEMPLATES if self.rendering > FIRST_RENDERING else ()),
            **extra,
            **dict(self.variables),
            "messages": list(messages),
        }
        try:
            template = _compile(
                self.source, is_first=self.rendering == FIRST_RENDERING, date=self.date
            )
            text: str = template.render(**values, add_generation_prompt=is_prompt)
        except ChatTemplateError:
            raise
        except Exception as error:
            # A template is a program of its author: it raises whatever its expressions raise.
            said = " ".join(str(error).split())[:200] or type(error).__name__
            if isinstance(error, UndefinedError) and "'strftime_now' is undefined" in said:
                raise DateNeededError("the chat template writes the date") from error
            raise ChatTemplateError(f"the chat template fails: {said}") from error
        self._refuse_addresses(text, values)
        return text

    def _refuse_addresses(self, text: str, values: Mapping[str, Any]) -> None:
        """Raise ChatTemplateError where an object of Python was written out with its place in memory, which
        is another one in each process."""
        found = _ADDRESS.search(text)
        if found is None:
            return
        # The row or the template may quote one, which is a text as any other.
        given = (self.source, json.dumps(values, ensure_ascii=False, default=str))
        if not any(found.group() in one for one in given):
            raise ChatTemplateError(
                f"the chat template writes {found.group()[:60]!r}, an object of Python with its place in "
                "memory, which differs in each process; it needs ['name'] in the place of .name, or a call"
            )


def check_template(source: str) -> None:
    """Raise ChatTemplateError unless ``source`` is a template."""
    try:
        _compile(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise ChatTemplateError(f"{where}{' '.join(str(error).split())[:200]}") from error


@lru_cache(maxsize=4)
def _compile(source: str, *, is_first: bool = False, date: str | None = None) -> Any:
    def raise_exception(message: str) -> None:
        raise ChatTemplateError(f"the chat template refuses it: {message}")

    # As tokenizers' templates expect it; sandboxed, since a template comes with a model. There is no clock:
    # the same rows must always give the same text. A date is one of the manifest.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_refuse_callable,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    # Chance would give the same row another text each time.
    environment.globals["lipsum"] = _refuse_chance
    environment.filters["random"] = _refuse_chance
    if date is not None:
        day = datetime.date.fromisoformat(date)
        environment.globals["strftime_now"] = day.strftime
    if is_first:
        # Rows whose template gives more are refused or left out, as they were.
        environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None: (
            _to_json(value, ensure_ascii, indent)
        )
    return environment.from_string(source)


def _refuse_chance(*_: object) -> str:
    raise ChatTemplateError(
        "the chat template asks for a random value, and the same rows always become the same text; "
        "remove it from the template"
    )


def _refuse_callable(value: Any) -> Any:
    """What a template writes out. Raises ChatTemplateError for a method: ``schema.items`` is one, since every
    mapping has it, where the key of that name was meant."""
    if callable(value) and not isinstance(value, Undefined):
        name = getattr(value, "__name__", type(value).__name__)
        raise ChatTemplateError(
            f"the chat template writes out the method {name!r} and not a value; "
            f"it needs ['{name}'] in the place of .{name}, or a call"
        )
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter that templates know, with transformers' arguments; jinja's own escapes what would end a tag
    of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _unmark(text: str) -> MarkedText:
    """``text`` without its marks, and where they were."""
    pieces, spans, length = [], [], 0
    for at, part in enumerate(text.split(_BEGIN)):
        turn, is_marked, rest = part.partition(_END) if at else ("", "", part)
        if at and not is_marked:
            raise ChatTemplateError(
                "a generation block of the chat template stands in another one"
            )
        if turn:
            spans.append(MarkedSpan(length, length + len(turn)))
        pieces += [turn, rest]
        length += len(turn) + len(rest)
    return MarkedText("".join(pieces), tuple(spans))

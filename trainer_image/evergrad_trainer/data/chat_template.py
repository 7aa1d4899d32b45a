"""Chat templates: render messages as text, and mark the parts of the text that the assistant wrote."""

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
"""File name of the template in a tokenizer's directory."""
TEMPLATE_FOLDER: Final = "additional_chat_templates"
"""Folder in a tokenizer's directory with further templates, each named after its file."""
FOR_TEMPLATES: Final = ("tools", "documents")
"""Keys of a conversation that are passed to its template in addition to the messages."""
FIRST_RENDERING: Final = 1
"""Number of the first rule. Missing keys of a conversation were undefined, and ``tojson`` had fewer
arguments."""
FORMS_OF_CONTENT: Final = 3
"""Number of the first rule that accepts contents that are parts or missing, and finds turns in any
template."""
RENDERING: Final = 3
"""Number of the current rule that renders conversations as text. If the rule changes, the number must change
too, because a run that started with an earlier rule continues with the texts of that rule."""
_ADDRESS: Final = re.compile(r"<[^<>]* at 0x[0-9a-f]{4,16}>")
"""Matches the default ``repr`` of a Python object, for example ``<function f at 0x7f00>``."""
_BEGIN: Final = "\ud800"
_END: Final = "\udfff"
"""Marks around the text of a ``generation`` block: halves of surrogate pairs, which no text contains."""


class ChatTemplateError(Exception):
    """A template cannot render a conversation. The message contains the reason."""


class _Generation(Extension):
    """Jinja extension for ``{% generation %}…{% endgeneration %}``, the block around an assistant turn."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class DateNeededError(ChatTemplateError):
    """A template writes the date, but no date was configured."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template of a tokenizer.

    ``variables``: names and values in addition to the messages, for example ``eos_token``. ``rendering``:
    number of the rule that renders texts, :data:`RENDERING` or an earlier number. ``date``: the day
    (YYYY-MM-DD) that ``strftime_now`` returns; if it is None, the template has no such function.
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
        """Render a conversation, and mark the assistant's turns after the first ``num_before`` messages.

        If the template has ``generation`` blocks, the marked spans are the contents of these blocks.
        Otherwise, a turn is the text that follows the prompt for this turn: see :func:`find_turn`. Raises
        ChatTemplateError if the template fails or a turn cannot be found.
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
        """Return ``whole``, the text of the messages, with the assistant's turns marked."""
        if _BEGIN in whole:
            text = _unmark(whole)
            if not any(message["role"] == ASSISTANT for message in messages[:num_before]):
                return text
            # A turn may have several blocks, so blocks cannot be counted. Skip the blocks that lie in the
            # text of the first num_before messages.
            before = _unmark(self._text(messages[:num_before], extra))
            if not text.startswith(before):
                raise ChatTemplateError(
                    "the template does not render the conversation after the text of its prompt, so "
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
                f"the template does not render message {error.at + 1} after its prompt, so its text "
                "cannot be found; it needs {% generation %} blocks around assistant turns, as the "
                "templates for training that come with trl have them (chat_templates/*_training.jinja)"
            ) from None
        return MarkedText(whole, tuple(spans))

    def _choose_form(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Return the messages in the first form that the template renders completely, and their text.

        The form of the row comes first, because it gives the same text as transformers. Some templates
        support only contents that are texts, or only lists of parts, or fail if contents are missing; they
        omit other contents or write them as Python values.
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
            # Skip a text in which the template wrote a list of parts as a Python value.
            if first is None and not writes_parts(form, text):
                first = form, text
        if first is not None:
            return first
        raise failed or ChatTemplateError(
            "the template writes contents that consist of parts as lists"
        )

    def _find_dropped(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], text: str
    ) -> frozenset[str]:
        """Return the kinds of message parts that are missing from the text, by their names in ``PARTS``."""
        found = [
            (at, kind)
            for at, message in enumerate(messages)
            for kind, said in parts_of(message)
            if len(said.strip()) < SHORT or not is_shown(said, text)
        ]
        unsure = list(dict.fromkeys(found))
        # A template may write a part in another form, for example as JSON or stripped, and a short part may
        # match by chance. Replace these parts with unique probes and look for the probes in the text. First
        # replace all parts together. If a probe is missing, replace the parts one by one, because a changed
        # part may affect how another part is rendered.
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
        """Whether the template renders unique probe texts that replace the parts at ``places``."""
        changed = list(messages)
        probes = [f"{PROBE}{number}{PROBE}" for number in range(len(places))]
        for (at, kind), probe in zip(places, probes, strict=True):
            changed[at] = replace_part(changed[at], kind, probe)
        try:
            text = self._text(changed, extra)
        except ChatTemplateError:
            # The template refuses the probe, so it reads the part, if only one part was replaced.
            return len(places) == 1
        return all(probe in text for probe in probes)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        is_prompt: bool = False,
    ) -> str:
        # Pass missing keys as None, as transformers does. None differs from undefined in a template.
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
            # The expressions of a template can raise exceptions of any type.
            said = " ".join(str(error).split())[:200] or type(error).__name__
            if isinstance(error, UndefinedError) and "'strftime_now' is undefined" in said:
                raise DateNeededError("the chat template writes the date") from error
            raise ChatTemplateError(f"the chat template fails: {said}") from error
        self._refuse_addresses(text, values)
        return text

    def _refuse_addresses(self, text: str, values: Mapping[str, Any]) -> None:
        """Raise ChatTemplateError if the text contains the memory address of a Python object.

        The address differs in each process, so the same row would get different texts.
        """
        found = _ADDRESS.search(text)
        if found is None:
            return
        # Accept an address that the row or the template quotes, because it is ordinary text.
        given = (self.source, json.dumps(values, ensure_ascii=False, default=str))
        if not any(found.group() in one for one in given):
            raise ChatTemplateError(
                f"the chat template writes {found.group()[:60]!r}, an object of Python with its place in "
                "memory, which differs in each process; it needs ['name'] in the place of .name, or a call"
            )


def check_template(source: str) -> None:
    """Raise ChatTemplateError if ``source`` is not a valid template."""
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

    # Use the options that templates of tokenizers expect. The environment is sandboxed, because a template
    # comes with a model. It has no clock, because the same rows must always give the same text; a date comes
    # from the manifest.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_refuse_callable,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    # Refuse random values, which would give the same row another text each time.
    environment.globals["lipsum"] = _refuse_chance
    environment.filters["random"] = _refuse_chance
    if date is not None:
        day = datetime.date.fromisoformat(date)
        environment.globals["strftime_now"] = day.strftime
    if is_first:
        # Keep the earlier signature: if a template passes more arguments, its rows are refused or skipped, as
        # in the version that started the run.
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
    """Return a value that a template writes. Raises ChatTemplateError if the value is a method.

    For example, ``schema.items`` is the method of a mapping, although the template meant the key ``items``.
    """
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
    """The filter ``tojson`` with the arguments of transformers. Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _unmark(text: str) -> MarkedText:
    """Return ``text`` without its marks, and the spans that were marked."""
    pieces, spans, length = [], [], 0
    for at, part in enumerate(text.split(_BEGIN)):
        turn, is_marked, rest = part.partition(_END) if at else ("", "", part)
        if at and not is_marked:
            raise ChatTemplateError(
                "a generation block of the chat template is nested in another one"
            )
        if turn:
            spans.append(MarkedSpan(length, length + len(turn)))
        pieces += [turn, rest]
        length += len(turn) + len(rest)
    return MarkedText("".join(pieces), tuple(spans))

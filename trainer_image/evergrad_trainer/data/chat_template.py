"""Chat templates: messages → text, and which parts of the text are the assistant's."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evergrad_trainer.data.marked_text import MarkedText, Span

ASSISTANT: Final = "assistant"
TEMPLATE_FILE: Final = "chat_template.jinja"
"""Name of the template in a tokenizer's directory."""
TEMPLATE_FOLDER: Final = "additional_chat_templates"
"""Folder in it with further templates, each named after its file."""
FOR_TEMPLATES: Final = ("tools", "documents")
"""Keys of a conversation that its template is given besides the messages."""
RENDERING: Final = 2
"""Number of the rule by which conversations become text. Another rule needs another number."""
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


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja template as tokenizers carry it.

    ``variables``: what it knows besides the messages, such as ``eos_token``. ``as_at_first``: it makes the
    text of the first versions, in which keys that a conversation lacks were undefined, and ``tojson`` had
    fewer arguments.
    """

    source: str
    variables: tuple[tuple[str, str], ...] = ()
    as_at_first: bool = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        num_before: int = 0,
    ) -> MarkedText:
        """The text of a conversation, in which the assistant's turns behind ``num_before`` messages are
        marked.

        Marked is what the template's ``generation`` blocks hold. A template without them has to render a
        conversation turn by turn: each turn is then what the text of the conversation up to it has more than
        the prompt for it. Raises ChatTemplateError.
        """
        whole = self._text(messages, extra, is_prompt=False)
        if _BEGIN in whole:
            text = _unmark(whole)
            if not any(message["role"] == ASSISTANT for message in messages[:num_before]):
                return text
            # Blocks need not be one a turn: those of the turns before lie in the text of these.
            before = _unmark(self._text(messages[:num_before], extra, is_prompt=False))
            if not text.startswith(before):
                raise ChatTemplateError(
                    "the template does not render the conversation behind the text of its prompt, so that "
                    "the completion cannot be found"
                )
            behind = [span for span in text.spans if span.start >= len(before)]
            return MarkedText(str(text), behind)
        spans = []
        for at, message in enumerate(messages):
            if message["role"] != ASSISTANT or at < num_before:
                continue
            prompt = self._text(messages[:at], extra, is_prompt=True)
            until = self._text(messages[: at + 1], extra, is_prompt=False)
            if not (until.startswith(prompt) and whole.startswith(until)):
                raise ChatTemplateError(
                    f"the template does not render message {at + 1} behind the prompt for it, so that its "
                    "text cannot be found; it needs {% generation %} blocks around assistant turns"
                )
            spans.append(Span(len(prompt), len(until)))
        return MarkedText(whole, tuple(spans))

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        *,
        is_prompt: bool,
    ) -> str:
        template = _compile(self.source, as_at_first=self.as_at_first)
        # As transformers gives them: None where a conversation has none, which is not undefined.
        values = {
            **dict.fromkeys(() if self.as_at_first else FOR_TEMPLATES),
            **extra,
            **dict(self.variables),
            "messages": list(messages),
        }
        try:
            text: str = template.render(**values, add_generation_prompt=is_prompt)
        except ChatTemplateError:
            raise
        except Exception as error:
            # A template is a program of its author: it raises whatever its expressions raise.
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise ChatTemplateError(f"the chat template fails: {said}") from error
        return text


def check_template(source: str) -> None:
    """Raise ChatTemplateError unless ``source`` is a template."""
    try:
        _compile(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise ChatTemplateError(f"{where}{' '.join(str(error).split())[:200]}") from error


@lru_cache(maxsize=4)
def _compile(source: str, *, as_at_first: bool = False) -> Any:
    def raise_exception(message: str) -> None:
        raise ChatTemplateError(f"the chat template refuses it: {message}")

    # As tokenizers' templates expect it; sandboxed, since a template comes with a model. There is no clock:
    # the same rows must always give the same text.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    if as_at_first:
        # Rows whose template gives more are refused or left out, as they were.
        environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None: (
            _to_json(value, ensure_ascii, indent)
        )
    return environment.from_string(source)


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
            spans.append(Span(length, length + len(turn)))
        pieces += [turn, rest]
        length += len(turn) + len(rest)
    return MarkedText("".join(pieces), tuple(spans))

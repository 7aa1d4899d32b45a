"""Messages ↔ lines of JSON. Strict both ways: a line that is no message of the protocol is refused, naming the field."""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evergrad_coordinator.protocol import FROM_COORDINATOR, FROM_NODES, MAX_TEXT, Message

MAX_LINE_BYTES = 64 * 1024
"""Longest message in either direction, with its newline."""
MAX_INTEGER = 2**53 - 1
"""Largest magnitude of a whole number: what every JSON reader holds exactly."""


class ProtocolError(ValueError):
    """A line that is no message of this protocol."""


def to_camel(name: str) -> str:
    """The wire's name of a field: ``first_rank`` → ``firstRank``."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def encode(message: Message) -> bytes:
    """One line with its newline. A ``message`` text that is too long is cut.

    Raises:
        ProtocolError: a number is not finite, or the line would be longer than ``MAX_LINE_BYTES``.
    """
    text = json.dumps({"type": message.TYPE, **_to_wire(message)}, separators=(",", ":"))
    if "NaN" in text or "Infinity" in text:
        _refuse_numbers(message)
    line = text.encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(
            f"{message.TYPE}: {len(line)} bytes are more than the {MAX_LINE_BYTES} of a line. Shorten its texts."
        )
    return line


def decode_from_node(line: bytes) -> Message:
    """What a node has sent. Raises ProtocolError, naming the field, for anything else."""
    return _decode(line, _NODE_TYPES)


def decode_from_coordinator(line: bytes) -> Message:
    """What the coordinator has sent. Raises ProtocolError, naming the field, for anything else."""
    return _decode(line, _COORDINATOR_TYPES)


_NODE_TYPES = {kind.TYPE: kind for kind in FROM_NODES}
_COORDINATOR_TYPES = {kind.TYPE: kind for kind in FROM_COORDINATOR}
_Reader = Callable[[Any, str], Any]


@dataclass(frozen=True)
class _Field:
    name: str
    wire: str
    read: _Reader
    is_required: bool


def _to_wire(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in _fields(type(message)):
        value = getattr(message, one.name)
        if isinstance(value, Message):
            value = _to_wire(value)
        elif one.name == "message":
            value = value[:MAX_TEXT]
        found[one.wire] = value
    return found


def _refuse_numbers(message: Message) -> None:
    for one in _fields(type(message)):
        value = getattr(message, one.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ProtocolError(
                f"{message.TYPE}.{one.wire}: {value} is no number JSON knows. Send null or leave it out."
            )


def _decode(line: bytes, known: Mapping[str, type[Message]]) -> Message:
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"line: more than {MAX_LINE_BYTES} bytes")
    try:
        found = json.loads(line)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, not JSON, or a number of thousands of digits
        raise ProtocolError(f"line: not JSON; {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise ProtocolError("line: not a JSON object")
    name = found.get("type")
    kind = known.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"type: {_show(name)} is none of {', '.join(known)}")
    return _build(kind, found, kind.TYPE)


def _build(kind: type[Message], found: dict[str, Any], where: str) -> Message:
    values = {}
    for one in _fields(kind):
        if one.wire in found:
            values[one.name] = one.read(found[one.wire], f"{where}.{one.wire}")
        elif one.is_required:
            raise ProtocolError(f"{where}.{one.wire}: missing")
    return kind(**values)


_known_fields: dict[type[Message], tuple[_Field, ...]] = {}


def _fields(kind: type[Message]) -> tuple[_Field, ...]:
    if kind not in _known_fields:
        _known_fields[kind] = _find_fields(kind)
    return _known_fields[kind]


def _find_fields(kind: type[Message]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        _Field(
            name=one.name,
            wire=to_camel(one.name),
            read=_reader(hints[one.name]),
            is_required=one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING,
        )
        for one in dataclasses.fields(kind)
    )


def _reader(hint: Any) -> _Reader:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return functools.partial(_read_choice, choices=arguments)
    if origin is types.UnionType and types.NoneType in arguments:
        inner = _reader(next(one for one in arguments if one is not types.NoneType))
        return lambda value, where: None if value is None else inner(value, where)
    if origin is dict:
        return _read_texts
    if isinstance(hint, type) and issubclass(hint, Message):
        return functools.partial(_read_message, kind=hint)
    raise TypeError(f"{hint}: no field of a message may have this type")


def _read_integer(value: Any, where: str) -> int:
    if type(value) is not int:
        raise ProtocolError(f"{where}: {_show(value)} is not a whole number")
    if abs(value) > MAX_INTEGER:
        raise ProtocolError(f"{where}: beyond {MAX_INTEGER}")
    return value


def _read_number(value: Any, where: str) -> float:
    if (
        type(value) not in (int, float)
        or (type(value) is int and abs(value) > MAX_INTEGER)
        or not math.isfinite(value)
    ):
        raise ProtocolError(f"{where}: {_show(value)} is not a finite number")
    return float(value)


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{where}: {_show(value)} is not a text")
    if len(value) > MAX_TEXT:
        raise ProtocolError(f"{where}: longer than {MAX_TEXT} characters")
    if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
        raise ProtocolError(f"{where}: not Unicode")
    return value


def _read_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{where}: {_show(value)} is neither true nor false")
    return value


def _read_choice(value: Any, where: str, *, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ProtocolError(f"{where}: {_show(value)} is none of {', '.join(choices)}")
    return value


def _read_texts(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: {_show(value)} is not an object")
    return {_read_text(key, where): _read_text(one, f"{where}.{key[:40]}") for key, one in value.items()}


def _read_message(value: Any, where: str, *, kind: type[Message]) -> Message:
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: {_show(value)} is not an object")
    return _build(kind, value, where)


def _show(value: Any) -> str:
    return ascii(value)[:60] if isinstance(value, str | int | float | bool | None) else type(value).__name__


_SCALARS: dict[Any, _Reader] = {int: _read_integer, float: _read_number, str: _read_text, bool: _read_flag}

"""Converts frozen dataclasses to lines of JSON and back. If a value does not fit, the error names its field.

A field may be an int, float, str, bool, enum or Literal, any of them or None, a dataclass, a tuple or a
mapping of such values, or ``Any`` for JSON that the caller checks. ``Annotated`` adds limits that a type
cannot express: ``FieldBounds`` of a number, ``MaxLength`` of a text. For example,
``Annotated[int, FieldBounds(0, 65535)]`` is a port.
"""

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

MAX_LINE_BYTES = 64 * 1024
"""Longest line in either direction, with its newline."""
MAX_INTEGER = 2**53 - 1
"""Largest magnitude of a whole number, which every JSON reader holds exactly."""
MAX_TEXT = 4096
"""Longest text of a record, in characters."""


class ProtocolError(ValueError):
    """A line is not a valid record. The text names the field."""


class UnknownTypeError(ProtocolError):
    """A well-formed record of an unknown type, for example from a newer sender."""


class Record(typing.Protocol):
    """Any dataclass. The value of ``type`` on the wire is its ``TYPE``, or else the name of its class."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class FieldBounds:
    """Least and greatest value of a number: ``Annotated[int, FieldBounds(0, 65535)]``."""

    least: int
    most: int


@dataclass(frozen=True)
class MaxLength:
    """Longest text, in characters. The sender cuts a longer one; the receiver refuses it."""

    most: int


LongText = typing.Annotated[str, MaxLength(MAX_TEXT)]
"""Text of unknown length, such as the last words of a failure."""


def to_camel(name: str) -> str:
    """Return the wire's name of a field: ``first_rank`` → ``firstRank``."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Codec(Generic[R]):
    """Lines of the given kinds of records, each one JSON object with its ``type``.

    Raises:
        TypeError: if a field of a record has a type that the codec does not support.
    """

    def __init__(
        self, kinds: Iterable[type[R]], *, max_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self._kinds = {_type_of(kind): kind for kind in kinds}
        self._max_bytes = max_bytes
        # An unsupported type fails here, and not at the first message.
        for kind in self._kinds.values():
            _fields(kind)

    def encode(self, record: R) -> bytes:
        """Return one line with its newline.

        Raises:
            ProtocolError: a number is not finite, or the line would be too long.
        """
        return encode(record, max_bytes=self._max_bytes)

    def decode(self, line: bytes) -> R:
        """Return the record of one line. Unknown fields are ignored, because a newer sender may have more.

        Raises:
            UnknownTypeError: no record of this codec has a type of that name.
            ProtocolError: the line is not a record for any other reason.
        """
        # Check the length first: a longer line is not worth the time to parse it.
        if len(line) > self._max_bytes:
            raise ProtocolError(f"line: more than {self._max_bytes} bytes")
        try:
            found = json.loads(line)
        # ValueError: not UTF-8, not JSON, or a number of thousands of digits.
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"line: not JSON; {type(error).__name__}") from None
        if not isinstance(found, dict):
            raise ProtocolError("line: not a JSON object")
        # Senders of every version name the type; an unknown name may be a message of a later version.
        name = found.get("type")
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            refusal = UnknownTypeError if isinstance(name, str) else ProtocolError
            raise refusal(f"type: {_show(name)} is none of {', '.join(self._kinds)}")
        return from_json(kind, found, where=_type_of(kind))


def encode(record: Record, *, max_bytes: int = MAX_LINE_BYTES) -> bytes:
    """Return one line with its newline. Raises ProtocolError as ``Codec.encode`` does."""
    # json refuses a number that is not valid JSON; only then search for its field.
    name = _type_of(type(record))
    found = {"type": name, **to_json(record)}
    try:
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    except ValueError:
        _refuse_numbers(found, where=name)
        raise
    line = text.encode("ascii") + b"\n"
    # The receiver would close the connection without a reason; this error names one.
    if len(line) > max_bytes:
        raise ProtocolError(
            f"{name}: {len(line)} bytes are more than the {max_bytes} of a line. Shorten its texts."
        )
    return line


def to_json(record: Record) -> dict[str, Any]:
    """Return the record as an object that ``json`` can write, with the wire's names."""
    return {one.wire: one.write(getattr(record, one.name)) for one in _fields(type(record))}


def from_json(kind: type[R], found: object, *, where: str) -> R:
    """Return the record of a JSON object. Raises ProtocolError, which names the field after ``where``."""
    if not isinstance(found, dict):
        raise ProtocolError(f"{where}: {_show(found)} is not an object")
    # Ignore unknown fields: a newer sender may have more.
    values = {}
    for one in _fields(kind):
        if one.wire in found:
            values[one.name] = one.read(found[one.wire], f"{where}.{one.wire}")
        elif one.is_required:
            raise ProtocolError(f"{where}.{one.wire}: missing")
    return kind(**values)


# ---- the fields of a record, found once --------------------------------------------------------------------

_Reader = Callable[[Any, str], Any]
_Writer = Callable[[Any], Any]
_UNIONS = (types.UnionType, typing.Union)
"""``int | None`` is the first, ``Annotated[int, …] | None`` the second."""


@dataclass(frozen=True)
class _Field:
    name: str
    wire: str
    read: _Reader
    write: _Writer
    is_required: bool


def _type_of(kind: type[Record]) -> str:
    return getattr(kind, "TYPE", kind.__name__)


@functools.cache
def _fields(kind: type[Record]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(
        _Field(
            name=one.name,
            wire=to_camel(one.name),
            read=_reader(hints[one.name]),
            write=_writer(hints[one.name]),
            is_required=one.default is dataclasses.MISSING
            and one.default_factory is dataclasses.MISSING,
        )
        for one in dataclasses.fields(kind)
    )


def _refuse_numbers(value: Any, *, where: str) -> None:
    """Raise ProtocolError for the first number that is not valid JSON, at any depth of the record."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(
            f"{where}: {value} is not a valid JSON number. Send null or leave it out."
        )
    if isinstance(value, dict):
        for key, one in value.items():
            _refuse_numbers(one, where=f"{where}.{key}")
    if isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _refuse_numbers(one, where=f"{where}[{number}]")


def _writer(hint: Any) -> _Writer:
    """Choose how a value of this type becomes JSON. ``_reader`` has refused unsupported types."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        cut = next((one for one in arguments[1:] if isinstance(one, MaxLength)), None)
        return _writer(arguments[0]) if cut is None else lambda value: value[: cut.most]
    if origin in _UNIONS:
        inner = _writer(next(one for one in arguments if one is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        one_item = _writer(arguments[0])
        return lambda value: [one_item(one) for one in value]
    if origin in (dict, Mapping):
        one_value = _writer(arguments[1])
        return lambda value: {key: one_value(one) for key, one in value.items()}
    if dataclasses.is_dataclass(hint):
        return to_json
    return lambda value: value


def _reader(hint: Any) -> _Reader:
    """Choose how a value of this type is read. Raises TypeError for a type that no field may have."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return functools.partial(
            _read_limited, read=_reader(arguments[0]), limits=arguments[1:]
        )
    if origin is Literal:
        return functools.partial(_read_choice, choices={one: one for one in arguments})
    if origin in _UNIONS and len(arguments) == 2 and types.NoneType in arguments:
        inner = _reader(next(one for one in arguments if one is not types.NoneType))
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return functools.partial(_read_items, read=_reader(arguments[0]))
    if origin in (dict, Mapping) and arguments[0] is str:
        return functools.partial(_read_mapping, read=_reader(arguments[1]))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(_read_choice, choices={one.value: one for one in hint})
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value, where: from_json(hint, value, where=where)
    raise TypeError(f"{hint}: no field of a record may have this type")


# ---- one reader a type -------------------------------------------------------------------------------------


def _read_integer(value: Any, where: str) -> int:
    # Not isinstance, because True is an int in Python.
    if type(value) is not int:
        raise ProtocolError(f"{where}: {_show(value)} is not a whole number")
    if abs(value) > MAX_INTEGER:
        raise ProtocolError(f"{where}: beyond {MAX_INTEGER}")
    return value


def _read_number(value: Any, where: str) -> float:
    is_number = type(value) is float or (type(value) is int and abs(value) <= MAX_INTEGER)
    if not is_number or not math.isfinite(value):
        raise ProtocolError(f"{where}: {_show(value)} is not a finite number")
    return float(value)


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{where}: {_show(value)} is not a text")
    if len(value) > MAX_TEXT:
        raise ProtocolError(f"{where}: longer than {MAX_TEXT} characters")
    # JSON can escape half a character, which no file and no log can hold.
    if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
        raise ProtocolError(f"{where}: not Unicode")
    return value


def _read_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{where}: {_show(value)} is neither true nor false")
    return value


def _read_choice(value: Any, where: str, *, choices: Mapping[str | int, Any]) -> Any:
    # Check the type first: as a key True equals 1, and a list cannot be a key.
    if type(value) not in (str, int) or value not in choices:
        named = ", ".join(str(one) for one in choices)
        raise ProtocolError(f"{where}: {_show(value)} is none of {named}")
    return choices[value]


def _read_limited(value: Any, where: str, *, read: _Reader, limits: Sequence[Any]) -> Any:
    known = read(value, where)
    for limit in limits:
        if isinstance(limit, FieldBounds) and not limit.least <= known <= limit.most:
            raise ProtocolError(
                f"{where}: {known} is not within {limit.least} and {limit.most}"
            )
        if isinstance(limit, MaxLength) and len(known) > limit.most:
            raise ProtocolError(f"{where}: longer than {limit.most} characters")
    return known


def _read_items(value: Any, where: str, *, read: _Reader) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProtocolError(f"{where}: {_show(value)} is not a list")
    return tuple(read(one, f"{where}[{number}]") for number, one in enumerate(value))


def _read_mapping(value: Any, where: str, *, read: _Reader) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: {_show(value)} is not an object")
    # Name a key by its beginning: the whole key may be as long as the line.
    return {
        _read_text(key, where): read(one, f"{where}.{key[:40]}")
        for key, one in value.items()
    }


def _show(value: Any) -> str:
    # The text goes into a log, so a peer's value is cut, and escaped if it is not ASCII.
    return (
        ascii(value)[:60]
        if isinstance(value, str | int | float | bool | None)
        else type(value).__name__
    )


_SCALARS: dict[Any, _Reader] = {
    int: _read_integer,
    float: _read_number,
    str: _read_text,
    bool: _read_flag,
    Any: lambda value, where: value,
}

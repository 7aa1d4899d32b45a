"""Writes frozen dataclasses to a run's status and reads them back. Pure.

Each field declares its place in the status and its kind::

    step: Annotated[int, At("memory.budget.step", NATURAL)] = -1

``encode`` and ``decode`` follow these declarations:

- A value that is missing or not valid is read as the field's default.
- A value that equals the default is left out, unless the field is written ``always``.
- A field without a declaration contains another such dataclass, whose fields declare places of their own. It
  has its default if a required field of that dataclass is missing.
- ``status.memory`` contains texts only. Fields with the same place below it share one text: for example,
  ``memory.budget.step`` is a key of the JSON in the text ``memory.budget``. ``Layout.texts`` declares other
  forms of texts.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from evergrad_common.codec import Record
from evergrad_operator.core.objects.raw import NOTHING, get_map, get_maps, get_text
from evergrad_operator.core.objects.status_encoding import (
    pack_mapping,
    unpack_mapping,
    without_empty,
)

R = TypeVar("R", bound=Record)
Raw = Mapping[str, Any]
_Place = tuple[str, ...]
_TEXTS: Final = "memory"
"""Name of the part of a status that contains only texts."""


def _keep(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """How one value is stored.

    ``read``: returns the value under a key of a mapping, or None if it is missing or not valid. ``write``:
    returns the value as JSON, or None to leave it out.
    """

    read: Callable[[Raw, str], Any]
    write: Callable[[Any], Any] = _keep


@dataclass(frozen=True)
class At:
    """The place and the kind of a field. ``always``: write the field even if it has its default."""

    place: str
    kind: Kind
    always: bool = False


@dataclass(frozen=True)
class TextForm:
    """The form of a text that several fields share. The last argument is the mapping of all texts."""

    unpack: Callable[[str, Raw], Raw]
    pack: Callable[[Raw, Raw], str]


JSON: Final = TextForm(
    unpack=lambda text, _: unpack_mapping(text), pack=lambda values, _: pack_mapping(values)
)


@dataclass(frozen=True)
class Layout:
    """The declarations that concern several fields; a dataclass contains them as ``LAYOUT``.

    ``needs``: fields by place; the place is left out if all of these fields have their defaults.
    ``derived``: properties by place, which are written but never read.
    ``texts``: forms of texts that are not JSON, by the name of the text.
    ``required``: fields with a default that are required all the same.
    """

    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, TextForm] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def decode(record: type[R], status: Raw) -> R:
    """Return the record in a status.

    Raises:
        TypeError: a field of the record declares no place, or a required field is missing.
    """
    plan = _plan(record)
    found = _read(plan, _Reader(status, plan.texts))
    return record() if found is None else typing.cast(R, found)


def encode(record: Record) -> dict[str, Any]:
    """Return the parts of a status that contain the record."""
    plan = _plan(type(record))
    found: dict[str, Any] = {}
    _write(plan, record, found)
    texts = found.get(_TEXTS, {})
    for name, values in texts.items():
        if isinstance(values, dict):
            texts[name] = plan.texts.get(name, JSON).pack(values, texts)
    cleaned: dict[str, Any] = without_empty(found)
    return cleaned


def one_record(record: type[Record]) -> Kind:
    """A mapping that contains one record. The places of its fields are relative to the mapping."""

    def read(raw: Raw, key: str) -> Any:
        values = get_map(raw, key)
        return decode(record, values) if values else None

    return Kind(read, encode)


def list_of_records(record: type[Record], *, most: int) -> Kind:
    """A list of at most ``most`` records, of which the last are kept."""
    return Kind(
        read=lambda raw, key: tuple(
            decode(record, values) for values in get_maps(raw, key)[-most:]
        ),
        write=lambda records: [encode(one) for one in records],
    )


# ---- the declarations of a dataclass, found once -----------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    name: str
    key: str
    read: Callable[[Raw, str], Any]
    write: Callable[[Any], Any]
    default: Any
    always: bool


@dataclass(frozen=True)
class _Plan:
    """``groups``: fields by the place above them. ``nested``: fields that contain another dataclass."""

    record: type[Record]
    groups: Mapping[_Place, list[_Field]]
    nested: Mapping[str, "_Plan"]
    defaults: Mapping[str, Any]
    required: frozenset[str]
    texts: Mapping[str, TextForm]
    needs: Mapping[_Place, tuple[str, ...]]
    derived: Mapping[_Place, str]


@functools.cache
def _plan(record: type[Record]) -> _Plan:
    hints = typing.get_type_hints(record, include_extras=True)
    layout: Layout = getattr(record, "LAYOUT", Layout())
    groups: dict[_Place, list[_Field]] = {}
    nested: dict[str, _Plan] = {}
    defaults: dict[str, Any] = {}
    fields = dataclasses.fields(record)
    for one in fields:
        hint = hints[one.name]
        if one.default_factory is not dataclasses.MISSING:
            defaults[one.name] = one.default_factory()
        elif one.default is not dataclasses.MISSING:
            defaults[one.name] = one.default

        stored = _find_place(hint)
        if stored is not None:
            *above, key = stored.place.split(".")
            default = defaults.get(one.name, dataclasses.MISSING)
            kind = stored.kind
            groups.setdefault(tuple(above), []).append(
                _Field(one.name, key, kind.read, kind.write, default, stored.always)
            )
            continue
        inner = _find_record(hint)
        if inner is None:
            raise TypeError(
                f"{record.__name__}.{one.name}: declares no place in the status"
            )
        nested[one.name] = _plan(inner)

    texts = dict(layout.texts)
    for plan in nested.values():
        texts |= plan.texts
    return _Plan(
        record,
        groups,
        nested,
        defaults,
        required=layout.required | ({one.name for one in fields} - defaults.keys()),
        texts=texts,
        needs={tuple(place.split(".")): names for place, names in layout.needs.items()},
        derived={tuple(place.split(".")): name for place, name in layout.derived.items()},
    )


def _find_record(hint: Any) -> type[Record] | None:
    """Return the dataclass in a hint such as ``Budget`` or ``FirstStatus | None``."""
    hints = (hint, *typing.get_args(hint))
    return next(
        (one for one in hints if isinstance(one, type) and dataclasses.is_dataclass(one)),
        None,
    )


def _find_place(hint: Any) -> At | None:
    extras = getattr(hint, "__metadata__", ())
    return next((one for one in extras if isinstance(one, At)), None)


# ---- one status --------------------------------------------------------------------------------------------


class _Reader:
    """The mappings of one status by their place. Each text is unpacked once."""

    def __init__(self, status: Raw, texts: Mapping[str, TextForm]) -> None:
        self._texts = texts
        self._found: dict[_Place, Raw] = {(): status}

    def find(self, place: _Place) -> Raw:
        found = self._found.get(place)
        if found is None:
            above, name = self.find(place[:-1]), place[-1]
            if place[:-1] == (_TEXTS,):
                text = get_text(above, name)
                form = self._texts.get(name, JSON)
                found = form.unpack(text, above) if text else NOTHING
            else:
                found = get_map(above, name)
            self._found[place] = found
        return found


def _read(plan: _Plan, reader: _Reader) -> Any:
    """Return the record; None if a required field is missing."""
    values: dict[str, Any] = {}
    for place, fields in plan.groups.items():
        # Most places of a status are empty.
        if raw := reader.find(place):
            for one in fields:
                value = one.read(raw, one.key)
                if value is not None:
                    values[one.name] = value
    if not plan.required <= values.keys():
        return None
    for name, inner in plan.nested.items():
        value = _read(inner, reader)
        if value is not None:
            values[name] = value
    return plan.record(**values)


def _write(plan: _Plan, record: Any, status: dict[str, Any]) -> None:
    for place, fields in plan.groups.items():
        for one in fields:
            value = getattr(record, one.name)
            if one.always or value != one.default:
                _put(status, place, one.key, one.write(value))
    for name, inner in plan.nested.items():
        if (value := getattr(record, name)) is not None:
            _write(inner, value, status)
    for (*above, key), name in plan.derived.items():
        _put(status, above, key, getattr(record, name))

    # Drop the places whose fields have no meaning without the needed ones.
    for (*above, key), names in plan.needs.items():
        if all(getattr(record, name) == plan.defaults[name] for name in names):
            _go_to(status, above).pop(key, None)


def _put(status: dict[str, Any], above: Iterable[str], key: str, value: Any) -> None:
    if value is not None:
        _go_to(status, above)[key] = value


def _go_to(status: dict[str, Any], place: Iterable[str]) -> dict[str, Any]:
    for name in place:
        status = status.setdefault(name, {})
    return status

"""The kinds of values in a run's status. Each one limits what it reads, because any client with access to the
status can write it, and the operator writes again what it reads. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_operator.core.objects.names import MAX_ATTEMPT
from evergrad_operator.core.objects.raw import (
    get_float,
    get_hosts,
    get_int,
    get_map,
    get_natural,
    get_text,
    keep_start,
)
from evergrad_operator.core.objects.status_codec import Kind
from evergrad_operator.core.objects.status_encoding import (
    format_rate,
    pack_counts,
    pack_mapping,
    pack_ranges,
    parse_rate,
    unpack_counts,
    unpack_mapping,
    unpack_ranges,
)
from evergrad_operator.core.objects.times import LATEST, format_time, parse_time

MAX_CAUSES: Final = 16
LONGEST_CAUSE: Final = 32
MAX_HOSTS: Final = 8
"""Maximum number of hosts with faults that are stored. A node that avoids more hosts might fit on no host."""
_MOST_VALUE: Final = 1e15


# ---- numbers -----------------------------------------------------------------------------------------------


def natural(most: int) -> Kind:
    """A whole number from 0 to ``most``. The default -1 of a field means that there is none."""
    return Kind(lambda raw, key: get_natural(raw, key, most=most))


def integer(most: int) -> Kind:
    """A whole number of a size of at most ``most``."""
    return Kind(lambda raw, key: get_int(raw, key, most=most))


NATURAL: Final = Kind(get_natural)
POSITIVE: Final = Kind(lambda raw, key: get_natural(raw, key, most=10**15) or None)
LOSS: Final = Kind(
    read=lambda raw, key: get_float(raw, key, least=-_MOST_VALUE, most=_MOST_VALUE),
    write=lambda loss: f"{loss:.3f}",
)
WHOLE_SECONDS: Final = Kind(
    read=lambda raw, key: get_float(raw, key, least=0, most=_MOST_VALUE), write=int
)
RATE: Final = Kind(lambda raw, key: parse_rate(get_text(raw, key)), format_rate)


# ---- times, in seconds since 1970 --------------------------------------------------------------------------


def _write_time(seconds: float | None) -> str | None:
    # The second 0 means that there is no time.
    return format_time(seconds) if seconds is not None and int(seconds) else None


TIME: Final = Kind(lambda raw, key: parse_time(raw.get(key)), _write_time)
TIME_NUMBER: Final = Kind(lambda raw, key: get_float(raw, key, least=0, most=LATEST))


# ---- texts and flags ---------------------------------------------------------------------------------------

TEXT: Final = Kind(lambda raw, key: get_text(raw, key) or None)
FLAG: Final = Kind(lambda raw, key: raw.get(key) is True)
FLAG_TEXT: Final = Kind(
    read=lambda raw, key: raw.get(key) == "true",
    write=lambda is_set: "true" if is_set else None,
)


def short_text(most: int) -> Kind:
    """A text that is read up to ``most`` characters."""
    return Kind(lambda raw, key: get_text(raw, key)[:most])


def message(most: int) -> Kind:
    """A text of at most ``most`` bytes of UTF-8."""
    return Kind(
        lambda raw, key: keep_start(get_text(raw, key), most),
        lambda text: keep_start(text, most),
    )


# ---- several values in one text ----------------------------------------------------------------------------

ATTEMPTS: Final = Kind(
    lambda raw, key: unpack_counts(get_text(raw, key), most=MAX_ATTEMPT), pack_counts
)
RANGES: Final = Kind(
    lambda raw, key: frozenset(unpack_ranges(get_text(raw, key))), pack_ranges
)


def _read_counters(raw: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key in raw:
        value = get_natural(raw, key, most=MAX_ATTEMPT)
        if value is not None and len(found) < MAX_CAUSES:
            found[str(key)[:LONGEST_CAUSE]] = value
    return found


COUNTERS: Final = Kind(
    lambda raw, key: _read_counters(get_map(raw, key)),
    lambda counters: dict(sorted(counters.items())),
)
COUNTERS_TEXT: Final = Kind(
    lambda raw, key: _read_counters(unpack_mapping(get_text(raw, key))), pack_mapping
)


# ---- hosts -------------------------------------------------------------------------------------------------


def _read_hosts(raw: Mapping[str, Any], key: str) -> tuple[tuple[str, int], ...]:
    # The newest faults come last; keep them.
    return tuple(dict(get_hosts(raw, key, most=MAX_ATTEMPT)[-MAX_HOSTS:]).items())


def _read_host_times(raw: Mapping[str, Any], key: str) -> tuple[tuple[str, float], ...]:
    times = dict(get_hosts(raw, key, most=LATEST))
    return tuple(
        (host, float(times[host])) for host, _ in _read_hosts(raw, "hosts") if host in times
    )


HOSTS: Final = Kind(_read_hosts, lambda hosts: [list(one) for one in hosts])
HOST_TIMES: Final = Kind(
    _read_host_times, lambda times: [[host, int(at)] for host, at in times]
)
"""The times of the hosts that the same mapping lists under ``hosts``."""


def only_read(kind: Kind) -> Kind:
    """A value that another part of the operator writes."""
    return Kind(kind.read, lambda value: None)

"""The node's board as a file: what a node tells its workers, in one record of fixed layout. The node writes,
workers read.

=======  ====  =====================================================================
offset   type  meaning (little-endian)
=======  ====  =====================================================================
0        4s    magic ``EVB1``
4        u32   CRC-32 of bytes 8 … 47, so that a reader never takes a half-written record
8        i64   newest generation the node has heard of
16       i64   generation its workers belong to, 0 for none
24       f64   last contact with the coordinator, seconds of CLOCK_MONOTONIC
32       f64   lease: seconds without contact after which workers must not work on
40       u32   flags: 1 = draining (save at the next step boundary and leave)
44       u32   zero
=======  ====  =====================================================================
"""

import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "EVERGRAD_BOARD"
"""Environment of workers: the directory that holds the board."""
GENERATION_VARIABLE = "EVERGRAD_GENERATION"
"""Environment of workers that live for one generation: its number."""
STOP_SECONDS_VARIABLE = "EVERGRAD_STOP_SECONDS"
"""Environment of workers: how long after SIGTERM a worker may still work."""
LEASE_LOST = 79
"""Exit code of a worker whose node has lost its lease: nobody has asked it to stop."""
RECORD_NAME = "board"
SOCKET_NAME = "socket"
MAX_LINE_BYTES = 4096
"""Longest line a worker may send over the socket, with its newline."""

_MAGIC = b"EVB1"
_HEAD = struct.Struct("<4sI")
_BODY = struct.Struct("<qqddII")
RECORD_BYTES = _HEAD.size + _BODY.size
_IS_DRAINING = 1
_READ_SECONDS = 1.0


class BoardError(ValueError):
    """The file is no board."""


@dataclass(frozen=True)
class Notice:
    """What the board says."""

    newest_generation: int
    own_generation: int
    contact: float
    lease_seconds: float
    is_draining: bool


def encode_notice(notice: Notice) -> bytes:
    """The record of ``RECORD_BYTES`` bytes."""
    flags = _IS_DRAINING if notice.is_draining else 0
    body = _BODY.pack(
        notice.newest_generation,
        notice.own_generation,
        notice.contact,
        notice.lease_seconds,
        flags,
        0,
    )
    return _HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def decode_notice(record: bytes) -> Notice:
    """Raises BoardError for anything but a whole record."""
    if len(record) != RECORD_BYTES:
        raise BoardError(f"board: {len(record)} bytes; a record has {RECORD_BYTES}.")
    magic, checksum = _HEAD.unpack_from(record)
    if magic != _MAGIC or checksum != zlib.crc32(record[_HEAD.size :]):
        raise BoardError("board: the record is torn, or of another version.")
    newest, own, contact, lease, flags, _ = _BODY.unpack_from(record, _HEAD.size)
    return Notice(newest, own, contact, lease, bool(flags & _IS_DRAINING))


def read_notice(directory: Path) -> Notice:
    """The newest whole record.

    Raises OSError when the node has closed its board, BoardError when it stays unreadable.
    """
    until = time.monotonic() + _READ_SECONDS
    descriptor = os.open(directory / RECORD_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                return decode_notice(os.pread(descriptor, RECORD_BYTES + 1, 0))
            except BoardError:
                # A write may have been halfway; the next look sees all of it.
                if time.monotonic() > until:
                    raise
    finally:
        os.close(descriptor)

"""The node state file: what a node shares with its workers, in one record of fixed layout. The node writes
it, and its workers read it.

=======  ====  =====================================================================
offset   type  meaning (little-endian)
=======  ====  =====================================================================
0        4s    magic ``EVB1``
4        u32   CRC-32 of bytes 8 … 47, so that a reader never takes a half-written record
8        i64   newest generation the node was informed of
16       i64   generation its workers belong to, 0 for none
24       f64   last contact with the coordinator, seconds of CLOCK_MONOTONIC
32       f64   lease: seconds without contact after which workers must stop working
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

DIRECTORY_VARIABLE = "EVERGRAD_NODE_STATE"
"""Environment of workers: the directory that holds the node state file."""
GENERATION_VARIABLE = "EVERGRAD_GENERATION"
"""Environment of workers that live for one generation: its number."""
STOP_SECONDS_VARIABLE = "EVERGRAD_STOP_SECONDS"
"""Environment of workers: how long after SIGTERM a worker may still work."""
LEASE_LOST = 79
"""Exit code of a worker that ends because its node has lost its lease, without a request to stop."""
RECORD_NAME = "state"
SOCKET_NAME = "socket"

_MAGIC = b"EVB1"
_HEAD = struct.Struct("<4sI")
_BODY = struct.Struct("<qqddII")
RECORD_BYTES = _HEAD.size + _BODY.size
_IS_DRAINING = 1
_READ_SECONDS = 1.0


class NodeStateError(ValueError):
    """The file does not contain a valid node state."""


@dataclass(frozen=True)
class NodeState:
    """The record: generations, lease, and whether the group is draining."""

    newest_generation: int
    own_generation: int
    contact: float
    lease_seconds: float
    is_draining: bool


def encode_node_state(state: NodeState) -> bytes:
    """The record of ``RECORD_BYTES`` bytes."""
    flags = _IS_DRAINING if state.is_draining else 0
    body = _BODY.pack(
        state.newest_generation,
        state.own_generation,
        state.contact,
        state.lease_seconds,
        flags,
        0,
    )
    return _HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def decode_node_state(record: bytes) -> NodeState:
    """Raises NodeStateError for anything but a whole record."""
    if len(record) != RECORD_BYTES:
        raise NodeStateError(
            f"node state: {len(record)} bytes; a record has {RECORD_BYTES}."
        )
    magic, checksum = _HEAD.unpack_from(record)
    if magic != _MAGIC or checksum != zlib.crc32(record[_HEAD.size :]):
        raise NodeStateError("node state: the record is torn, or of another version.")
    newest, own, contact, lease, flags, _ = _BODY.unpack_from(record, _HEAD.size)
    return NodeState(newest, own, contact, lease, bool(flags & _IS_DRAINING))


def read_node_state(directory: Path) -> NodeState:
    """The newest whole record.

    Raises OSError when the node has removed the file, NodeStateError when it stays unreadable.
    """
    until = time.monotonic() + _READ_SECONDS
    descriptor = os.open(directory / RECORD_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                return decode_node_state(os.pread(descriptor, RECORD_BYTES + 1, 0))
            except NodeStateError:
                # A write may have been halfway; the next look sees all of it.
                if time.monotonic() > until:
                    raise
    finally:
        os.close(descriptor)

"""Edits of a sequence of bases, and their application, which keeps the sequence's length. Pure.

Positions of a corpus count from 1, as in VCF; those within a window count from 0, and windows are half open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

from evergrad_manifest.training.latent_edit import LONGEST_ALLELE

BASES: Final = b"ACGT"
UNKNOWN_BASE: Final = b"N"


class EditType(IntEnum):
    """Kind of an edit, by the lengths of its two texts."""

    SNV = 0
    INSERTION = 1
    DELETION = 2
    MNV = 3
    INDEL = 4
    STRUCTURAL = 5
    """Longer than what is known here; refused."""


class EditError(ValueError):
    """An edit is none, or does not fit the sequence. Its text says why, without the sequence."""


def type_of(reference: str | bytes, alternate: str | bytes) -> EditType:
    """The kind of an edit that replaces ``reference`` by ``alternate``."""
    before, after = len(reference), len(alternate)
    if max(before, after) > LONGEST_ALLELE:
        return EditType.STRUCTURAL
    if before == after:
        return EditType.SNV if before == 1 else EditType.MNV
    if before == 1:
        return EditType.INSERTION
    return EditType.DELETION if after == 1 else EditType.INDEL


@dataclass(frozen=True)
class Edit:
    """A row of a corpus. ``position``: of the first base of ``reference``, from 1."""

    chromosome: str
    position: int
    reference: str
    alternate: str

    @property
    def key(self) -> str:
        """The edit as a hold-out names it."""
        return f"{self.chromosome}:{self.position}:{self.reference}:{self.alternate}"

    @property
    def end(self) -> int:
        """The last base of the reference, from 1."""
        return self.position + len(self.reference) - 1

    def check(self) -> None:
        """Raises EditError for what is no edit of few bases."""
        if self.position < 1:
            raise EditError(f"position {self.position} is below 1")
        for name, text in (("reference", self.reference), ("alternate", self.alternate)):
            if not text or set(text) - set("ACGT"):
                raise EditError(f"{name} is not a text of A, C, G and T")
        if self.reference == self.alternate:
            raise EditError("reference and alternate are equal")
        if type_of(self.reference, self.alternate) == EditType.STRUCTURAL:
            raise EditError(f"an allele is longer than {LONGEST_ALLELE} bases")


@dataclass(frozen=True, slots=True)
class RelativeEdit:
    """An edit within a window. ``position``: of the first base of ``reference``, from 0."""

    position: int
    reference: bytes
    alternate: bytes

    @property
    def end(self) -> int:
        """Behind the last base of the reference."""
        return self.position + len(self.reference)

    @property
    def change(self) -> int:
        """Bases that the sequence would grow by."""
        return len(self.alternate) - len(self.reference)

    @property
    def type(self) -> EditType:
        return type_of(self.reference, self.alternate)

    def overlaps(self, other: "RelativeEdit") -> bool:
        """Whether both replace some base."""
        return self.position < other.end and other.position < self.end


def relative(edit: Edit, *, start: int, length: int) -> RelativeEdit:
    """``edit`` within the window of ``length`` bases from ``start`` (from 0).

    Raises EditError unless it lies wholly inside.
    """
    position = edit.position - 1 - start
    if position < 0 or position + len(edit.reference) > length:
        raise EditError(f"{edit.key} does not lie inside the window")
    return RelativeEdit(position, edit.reference.encode(), edit.alternate.encode())


@dataclass(frozen=True)
class AppliedEdit:
    """A sequence after edits, of the same length as before. ``places``: where each edit's alternate begins,
    in the order of the edits."""

    sequence: bytes
    places: tuple[int, ...]


def apply_edits(sequence: bytes, edits: Sequence[RelativeEdit]) -> AppliedEdit:
    """``sequence`` after all ``edits``, whose positions are those before any of them.

    The length that an edit adds or takes is trimmed or filled up with N at the end of the sequence that is
    farther from it. Raises EditError for a reference that is not what stands there, and for edits that
    overlap.
    """
    length = len(sequence)
    ordered = sorted(edits, key=lambda one: one.position)
    for one, other in pairwise(ordered):
        if one.overlaps(other):
            raise EditError(f"two edits at {one.position} and {other.position} overlap")

    # From right to left, so that the positions of those that are left stay true.
    result = bytearray(sequence)
    left = right = 0
    for edit in reversed(ordered):
        if edit.position < 0 or edit.end > length:
            raise EditError(f"an edit at {edit.position} does not lie inside the window")
        if result[edit.position : edit.end] != edit.reference:
            raise EditError(
                f"the reference of an edit at {edit.position} is not what stands there"
            )
        result[edit.position : edit.end] = edit.alternate
        if edit.position + edit.end < length:
            right += edit.change
        else:
            left += edit.change

    fitted = bytes(result)
    fitted = fitted[left:] if left > 0 else UNKNOWN_BASE * -left + fitted
    fitted = fitted[: len(fitted) - right] if right > 0 else fitted + UNKNOWN_BASE * -right
    places = []
    for edit in edits:
        before = sum(one.change for one in ordered if one.position < edit.position)
        place = edit.position + before - left
        places.append(min(max(place, 0), length - 1))
    return AppliedEdit(fitted, tuple(places))

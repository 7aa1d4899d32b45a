"""Items that are trained on, as a pure function of their index.

An item is a window with edits that follow one another. Which ones: the seed, the content of the window, the
number of the draw and the place in the mixture decide, and nothing else. No item waits for another, so that
any process of any world computes any of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from evergrad_latent_edit.draws import Draws
from evergrad_latent_edit.edits import (
    BASES,
    Edit,
    EditError,
    RelativeEdit,
    apply_edits,
    relative,
)
from evergrad_latent_edit.windows import Window
from evergrad_manifest.errors import Problem
from evergrad_manifest.training.latent_edit import (
    LONGEST_MNV,
    OF_TABLES,
    SHORTEST_MNV,
    EditQuota,
)
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.order import Permutation, absorb

FAMILIES: Final = (
    "population",
    "clinical",
    "syntheticSnv",
    "syntheticIndel",
    "syntheticMnv",
)
"""Their places are part of what decides an item: new ones come behind."""
_MOST_TRIES: Final = 256
"""Draws of one synthetic edit, of which the first that is possible counts. With half of a window unknown the
chance that none is possible is below 1e-70."""


class TooFewError(Exception):
    """A window has too few edits of a family."""


@dataclass(frozen=True)
class Item:
    """``edits`` of ``window``, in the order in which they are applied. ``family``: that they are of.

    ``asked``: the family of the mixture; another one where that one fell back.
    """

    window: int
    edits: tuple[RelativeEdit, ...]
    family: str
    asked: str


@dataclass(frozen=True)
class ItemTable:
    """Rows of edits, sorted by their place, so that those inside of a window are found."""

    by_chromosome: Mapping[str, Sequence[Edit]]

    @staticmethod
    def of(edits: Mapping[str, Edit]) -> "ItemTable":
        found: dict[str, list[Edit]] = {}
        for edit in edits.values():
            found.setdefault(edit.chromosome, []).append(edit)
        for rows in found.values():
            rows.sort(key=lambda one: (one.position, one.reference, one.alternate))
        return ItemTable(found)

    def inside(self, window: Window) -> list[RelativeEdit]:
        """Rows that lie wholly inside ``window``, sorted; none for a window without coordinates."""
        if window.chromosome is None:
            return []
        rows = self.by_chromosome.get(window.chromosome, ())
        first = bisect_left(rows, window.start + 1, key=lambda one: one.position)
        last = bisect_right(rows, window.end, key=lambda one: one.position)
        length = len(window.sequence)
        return [
            relative(one, start=window.start, length=length)
            for one in rows[first:last]
            if one.end <= window.end
        ]


@dataclass(frozen=True)
class Items:
    """All items of some windows: each window, draw by draw, with the mixture in its order.

    ``held_out``: keys of edits that are not drawn either.
    """

    windows: Sequence[Window]
    mixture: Sequence[EditQuota]
    tables: Mapping[str, ItemTable]
    draws: int
    margin: int
    seed: int
    held_out: frozenset[str] = frozenset()

    @property
    def per_draw(self) -> int:
        """Items of one draw of one window."""
        return sum(quota.count for quota in self.mixture)

    def __len__(self) -> int:
        return len(self.windows) * self.draws * self.per_draw

    def item(self, index: int) -> Item:
        """Item ``index``, from 0. Raises IndexError, and DataError for a window without enough edits."""
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        rest, place = divmod(index, self.per_draw)
        number, draw = divmod(rest, self.draws)
        # The quota that has this place of the mixture, and the place within it.
        within = place
        for quota in self.mixture:
            if within < quota.count:
                break
            within -= quota.count
        window = self.windows[number]
        try:
            return Item(
                number,
                self._choose(window, quota, draw, place, within),
                quota.family,
                quota.family,
            )
        except TooFewError as error:
            if quota.fallback is None:
                raise DataError(_too_few(window, quota, str(error))) from None
        # As if it had been asked for, at this place: no other item draws the same.
        try:
            edits = self._synthesize(window, quota.fallback, quota.edits, draw, place)
        except TooFewError as error:
            raise DataError(_too_few(window, quota, str(error))) from None
        return Item(number, edits, quota.fallback, quota.family)

    def _choose(
        self, window: Window, quota: EditQuota, draw: int, place: int, within: int
    ) -> tuple[RelativeEdit, ...]:
        if quota.family not in OF_TABLES:
            return self._synthesize(window, quota.family, quota.edits, draw, place)
        table = self.tables.get(quota.family)
        rows = [] if table is None else table.inside(window)
        if within * quota.edits >= len(rows) or len(rows) < quota.edits:
            raise TooFewError(f"it has {len(rows)}")

        # Shuffled anew for each draw; items of one draw take different ones, as long as none overlap.
        order = Permutation(
            seed=self.seed,
            source=absorb(int(window.id[:16], 16), FAMILIES.index(quota.family)),
            epoch=draw,
            size=len(rows),
        )
        chosen: list[RelativeEdit] = []
        for number in range(len(rows)):
            one = rows[order((within * quota.edits + number) % len(rows))]
            if not any(one.overlaps(other) for other in chosen):
                chosen.append(one)
            if len(chosen) == quota.edits:
                break
        else:
            raise TooFewError(f"only {len(chosen)} of its {len(rows)} do not overlap")

        # A row says itself what stands at its place: a table of another genome must not be trained on.
        try:
            apply_edits(window.sequence, chosen)
        except EditError as error:
            why = "windows and edits are of two different genomes, or positions do not count from 1"
            problem = Problem(window.place, str(error), why, "Correct the corpus")
            raise DataError(problem) from None
        return tuple(chosen)

    def _synthesize(
        self, window: Window, family: str, count: int, draw: int, place: int
    ) -> tuple[RelativeEdit, ...]:
        key = absorb(
            self.seed, int(window.id[:16], 16), draw, place, FAMILIES.index(family)
        )
        draws = Draws(key)
        chosen: list[RelativeEdit] = []
        for _ in range(_MOST_TRIES * count):
            one = _DRAWN[family](window.sequence, self.margin, draws)
            if one is None or any(one.overlaps(other) for other in chosen):
                continue
            if self.held_out and window.key_of(one) in self.held_out:
                continue
            chosen.append(one)
            if len(chosen) == count:
                return tuple(chosen)
        why = f"{family} found no place for {count} between margins of {self.margin} bases"
        raise TooFewError(why)


def draw_snv(sequence: bytes, margin: int, draws: Draws) -> RelativeEdit | None:
    """One base for another, anywhere between the margins; None where it would be of an unknown base."""
    room = len(sequence) - 2 * margin
    if room < 1:
        return None
    position = margin + draws.below(room)
    reference = sequence[position : position + 1]
    others = [base for base in BASES if base != reference[0]]
    alternate = bytes([others[draws.below(3)]])
    return RelativeEdit(position, reference, alternate) if reference in BASES_SET else None


def draw_indel(sequence: bytes, margin: int, draws: Draws) -> RelativeEdit | None:
    """An insertion or a deletion behind an anchor; a deletion that would reach the margin is an insertion."""
    room = len(sequence) - 2 * margin
    if room < 1:
        return None
    position = margin + draws.below(room)
    is_insertion = draws.below(2) == 0
    length = draws.indel_length()
    anchor = sequence[position : position + 1]
    if not is_insertion and position + 1 + length <= len(sequence) - margin:
        reference = sequence[position : position + 1 + length]
        is_known = not set(reference) - set(BASES)
        return RelativeEdit(position, reference, anchor) if is_known else None
    added = bytes(BASES[draws.below(4)] for _ in range(length))
    return RelativeEdit(position, anchor, anchor + added) if anchor in BASES_SET else None


def draw_mnv(sequence: bytes, margin: int, draws: Draws) -> RelativeEdit | None:
    """2 to 8 bases for as many others, each of which differs."""
    length = SHORTEST_MNV + draws.below(LONGEST_MNV - SHORTEST_MNV + 1)
    room = len(sequence) - 2 * margin - length + 1
    if room < 1:
        return None
    position = margin + draws.below(room)
    reference = sequence[position : position + length]
    if set(reference) - set(BASES):
        return None
    alternate = bytes(
        [base for base in BASES if base != old][draws.below(3)] for old in reference
    )
    return RelativeEdit(position, reference, alternate)


BASES_SET: Final = frozenset(BASES[index : index + 1] for index in range(4))
_DRAWN: Final = {
    "syntheticSnv": draw_snv,
    "syntheticIndel": draw_indel,
    "syntheticMnv": draw_mnv,
}


def _too_few(window: Window, quota: EditQuota, why: str) -> Problem:
    number = quota.count * quota.edits
    what = f"has too few {quota.family} edits for {number}"
    remedy = f"Add them, lower their count in latentEdit.mixture, or give {quota.family} a fallback there"
    return Problem(window.place, what, why, remedy)

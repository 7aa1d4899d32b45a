"""Reads the windows of a corpus: sequences of one length, with their place where they have one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from evergrad_latent_edit.corpus import TRAIN, CorpusFile
from evergrad_latent_edit.edits import Edit, RelativeEdit
from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training.latent_edit import HoldOut
from evergrad_manifest.training.pretrain import HELD_OUT
from evergrad_trainer.base.errors import DataError

_MOST_PROBLEMS: Final = 20
_ALPHABET: Final = frozenset("ACGTN")


@dataclass(frozen=True)
class Window:
    """``sequence`` in upper case of A, C, G, T and N. ``start``: of its first base on the chromosome, from 0.

    ``place``: file and line that it comes from, for messages.
    """

    record_id: str
    sequence: bytes
    place: str
    source: str = ""
    chromosome: str | None = None
    start: int = 0

    @cached_property
    def id(self) -> str:
        """SHA-256 of the sequence, 64 hex digits."""
        return hashlib.sha256(self.sequence).hexdigest()

    @property
    def end(self) -> int:
        """Behind its last base on the chromosome, from 0."""
        return self.start + len(self.sequence)

    def key_of(self, edit: RelativeEdit) -> str:
        """An edit of it as a hold-out names it; empty without coordinates."""
        if self.chromosome is None:
            return ""
        reference, alternate = edit.reference.decode(), edit.alternate.decode()
        return Edit(
            self.chromosome, self.start + edit.position + 1, reference, alternate
        ).key


@dataclass(frozen=True)
class HoldOutPolicy:
    """Places that are never trained on, ready to be asked. ``hash``: of the whole policy."""

    settings: HoldOut
    chromosomes: frozenset[str] = field(init=False)
    edits: frozenset[str] = field(init=False)
    records: frozenset[str] = field(init=False)
    intervals: Mapping[str, Sequence[tuple[int, int]]] = field(init=False)
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        found: dict[str, list[tuple[int, int]]] = {}
        for interval in settings.intervals:
            chromosome, _, bases = interval.rpartition(":")
            first, _, last = bases.partition("-")
            found.setdefault(chromosome, []).append((int(first), int(last)))
        # By meaning: the order in the file decides nothing.
        wire = settings.model_dump(mode="json", by_alias=True)
        text = json.dumps({key: sorted(set(value)) for key, value in wire.items()})
        for name, value in (
            ("chromosomes", frozenset(settings.chromosomes)),
            ("edits", frozenset(settings.edits)),
            ("records", frozenset(settings.records)),
            ("intervals", {name: sorted(pairs) for name, pairs in found.items()}),
            ("hash", hashlib.sha256(text.encode()).hexdigest()),
        ):
            object.__setattr__(self, name, value)

    def meets(self, window: Window) -> bool:
        """Whether a window is held out: by its record, its chromosome, or an interval that it touches."""
        if window.record_id in self.records:
            return True
        if window.chromosome is None:
            return False
        return self._meets_bases(window.chromosome, window.start + 1, window.end)

    def meets_edit(self, edit: Edit) -> bool:
        """Whether a row of edits is held out."""
        return edit.key in self.edits or self._meets_bases(
            edit.chromosome, edit.position, edit.end
        )

    def _meets_bases(self, chromosome: str, first: int, last: int) -> bool:
        if chromosome in self.chromosomes:
            return True
        pairs = self.intervals.get(chromosome, ())
        return any(begin <= last and first <= end for begin, end in pairs)


def read_windows(
    files: Sequence[CorpusFile], policy: HoldOutPolicy
) -> dict[str, list[Window]]:
    """The windows of each split, in the order of their files; ``train`` first.

    Those that ``policy`` holds out of what is trained on are the split ``heldOut``. Raises DataError with
    all that is wrong in them.
    """
    found: dict[str, list[Window]] = {TRAIN: []}
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    length: tuple[int, str] | None = None
    for file in files:
        count, known = 0, len(problems)
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place, is_placed = f"{file.name}:{number}", file.kind == "placed"
                one = _read_line(line, place, is_placed=is_placed)
                if isinstance(one, Problem):
                    problems.append(one)
                    continue
                count += 1
                if one.record_id in seen:
                    why = f"{seen[one.record_id]} has it, too"
                    what = f"the record id {one.record_id!r} is not the only one"
                    problems.append(
                        Problem(one.place, what, why, "Give each window an id of its own")
                    )
                length = length or (len(one.sequence), one.place)
                if len(one.sequence) != length[0]:
                    why = f"the first, {length[1]}, has {length[0]}"
                    what = f"the sequence has {len(one.sequence)} bases"
                    remedy = "Cut all windows of a corpus to one length"
                    problems.append(Problem(one.place, what, why, remedy))
                seen[one.record_id] = one.place
                split = TRAIN if file.is_train else str(file.split)
                if file.is_train and policy.meets(one):
                    split = HELD_OUT
                found.setdefault(split, []).append(one)
                if len(problems) >= _MOST_PROBLEMS:
                    raise DataError(*problems)
        if file.records is not None and count != file.records and len(problems) == known:
            what, why = f"has {count} windows", f"the corpus's manifest says {file.records}"
            problems.append(Problem(str(file.path), what, why, "Make the manifest anew"))
    if not problems and not found[TRAIN]:
        what = "have no window to train on"
        why = "a split whose name begins with train is trained on, but for what is held out"
        names = ", ".join(file.name for file in files)
        problems.append(Problem(names, what, why, "Add windows, or hold out less"))
    raise_if(problems, DataError)
    return found


def _read_line(line: bytes, place: str, *, is_placed: bool) -> Window | Problem:
    """One window. No message shows its sequence."""
    try:
        raw = json.loads(line.strip())
    except ValueError as error:
        # Errors of JSON give the column alone: others quote the text.
        column = getattr(error, "colno", None)
        what = "is no JSON" if column is None else f"is no JSON, at column {column}"
        return Problem(place, what, "each line is one object", "Correct it")
    if not isinstance(raw, Mapping):
        return Problem(place, "holds no object", "each line is one window", "Correct it")
    sequence = raw.get("sequence")
    if not isinstance(sequence, str) or not sequence:
        what = (
            "sequence is missing" if sequence is None else "sequence is not a text of bases"
        )
        return Problem(place, what, "it is what is edited", "Add it")
    canonical = sequence.upper()
    at = next((index for index, one in enumerate(canonical) if one not in _ALPHABET), None)
    if at is not None:
        why = "bases are A, C, G, T and N"
        return Problem(
            place, f"sequence has another letter at {at + 1}", why, "Replace it by N"
        )

    # Coordinates, which a window of ``placed/`` has to have.
    chromosome, start = raw.get("chrom"), raw.get("start_bp", 0)
    if is_placed and (not isinstance(chromosome, str) or not chromosome):
        why = "windows of placed/ have coordinates"
        return Problem(
            place, "chrom is missing", why, "Add it, or list the file under carbon/"
        )
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        return Problem(
            place, "start_bp is no count", "it counts bases from 0", "Correct it"
        )
    return Window(
        record_id=str(raw.get("record_id") or place),
        sequence=canonical.encode(),
        place=place,
        source=str(raw.get("source") or ""),
        chromosome=chromosome if isinstance(chromosome, str) and chromosome else None,
        start=start,
    )

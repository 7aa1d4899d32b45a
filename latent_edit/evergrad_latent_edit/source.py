"""The items of one split as rows of a batch: with their states, or with the tokens that they are made of."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from evergrad_latent_edit.edits import (
    BASES,
    EditType,
    RelativeEdit,
    apply_edits,
)
from evergrad_latent_edit.encoder import Encoder
from evergrad_latent_edit.items import FAMILIES
from evergrad_latent_edit.preparation import STATES, Arrays, array_path
from evergrad_trainer.data.batch import Rows

POSITION: Final = "position"
TYPE: Final = "type"
REFERENCE: Final = "reference"
ALTERNATE: Final = "alternate"
MASK: Final = "mask"
STATE: Final = "state"
TARGET: Final = "target"
BEFORE: Final = "before"
BEFORE_SPAN: Final = "before_span"
AFTER: Final = "after"
AFTER_SPAN: Final = "after_span"

MER: Final = 6
"""Bases that are read as one."""
MERS: Final = 3
"""Groups of bases that an allele of up to 16 bases has."""
NO_BASE: Final = len(BASES)
"""The digit behind the end of an allele."""
NUM_MERS: Final = (NO_BASE + 1) ** MER
NO_MER: Final = NUM_MERS - 1
"""Six times no base."""


def digits_of(alleles: npt.NDArray[np.bytes_]) -> npt.NDArray[np.uint8]:
    """Alleles [...] as digits [..., 18]: 0 to 3 for a base, 4 for none."""
    letters = np.ascontiguousarray(alleles).view(np.uint8).reshape(*alleles.shape, -1)
    # One look-up for all letters: the zero bytes behind a short allele become NO_BASE as well.
    table = np.full(256, NO_BASE, dtype=np.uint8)
    table[list(BASES)] = range(len(BASES))
    digits = np.full((*alleles.shape, MER * MERS), NO_BASE, dtype=np.uint8)
    digits[..., : letters.shape[-1]] = table[letters]
    return digits


def mers_of(digits: npt.NDArray[np.uint8]) -> npt.NDArray[np.int16]:
    """Digits [..., 18] as groups of six bases [..., 3]: each a number to the base of 5."""
    # Widened first: powers of 5 do not fit into the type of a digit.
    groups = digits.reshape(*digits.shape[:-1], MERS, MER).astype(np.int32)
    powers = (NO_BASE + 1) ** np.arange(MER - 1, -1, -1, dtype=np.int32)
    found: npt.NDArray[np.int16] = (groups * powers).sum(-1).astype(np.int16)
    return found


def types_of(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The types of edits by the numbers of their bases, as ``type_of`` has them."""
    alike = np.where(before == 1, EditType.SNV, EditType.MNV)
    shorter = np.where(after == 1, EditType.DELETION, EditType.INDEL)
    unlike = np.where(before == 1, EditType.INSERTION, shorter)
    return np.where(before == after, alike, unlike)


class EditSource:
    """Items of one split, as they were prepared.

    Tensors of B rows and K edits: position and type [B, K], reference and alternate [B, K, 3], mask [B, K].
    Cached: state [B, D] and target [B, K, D]. Live: before [B, T] and after [B, K, T], tokens, each with the
    first one that is pooled and the one behind the last.
    """

    def __init__(
        self, folder: Path, split: str, facts: Mapping[str, Any], encoder: Encoder | None
    ) -> None:
        """``encoder``: what tokenises, where states are made in each step; None where they are kept."""
        self._folder = folder
        self._split = split
        self._encoder = encoder
        self._tokens = int(facts["tokens"])
        self.fingerprint: str = facts["splits"][split]["sha256"]
        self._len = int(facts["splits"][split]["items"])

    @property
    def fill(self) -> Mapping[str, int]:
        """A row of fill has no edit: its mask is false."""
        return {REFERENCE: NO_MER, ALTERNATE: NO_MER}

    def __len__(self) -> int:
        return self._len

    @cached_property
    def _arrays(self) -> Arrays:
        with np.load(array_path(self._folder, self._split), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    @cached_property
    def _states(self) -> npt.NDArray[np.float32]:
        # Mapped and not read: the states of all items may be larger than the memory.
        states: npt.NDArray[np.float32] = np.load(self._folder / STATES, mmap_mode="r")
        return states

    def read(self, items: Sequence[int]) -> Rows:
        """Read some items into memory of their own."""
        numbers = list(items)
        tensors = {
            name: torch.from_numpy(values[numbers]).to(
                torch.bool if name == MASK else torch.int64
            )
            for name, values in self._actions.items()
        }
        if self._encoder is None:
            rows = self._arrays["rows"][numbers]
            # Rows of no edit (-1) get the first state, and are then cleared.
            states = torch.from_numpy(np.array(self._states[np.maximum(rows, 0)]))
            states[torch.from_numpy(rows < 0)] = 0
            tensors |= {STATE: states[:, 0].clone(), TARGET: states[:, 1:].clone()}
        else:
            # The encoder runs in each step: it gets token ids, and makes the states of them.
            arrays, length = self._arrays, self._tokens
            most = arrays["positions"].shape[1]
            before = torch.zeros((len(numbers), length), dtype=torch.int64)
            before_span = torch.zeros((len(numbers), 2), dtype=torch.int64)
            after = torch.zeros((len(numbers), most, length), dtype=torch.int64)
            after_span = torch.zeros((len(numbers), most, 2), dtype=torch.int64)
            for row, item in enumerate(numbers):
                sequence = arrays["sequences"][arrays["windows"][item]].tobytes()
                tokens = self._encoder.tokenize(sequence, None)
                before[row] = tokens.tensor()
                before_span[row] = torch.tensor([tokens.first, tokens.last])
                edits = self.edits(item)
                for place in range(len(edits)):
                    # Each state follows all edits so far, the newest of which it is pooled at.
                    applied = apply_edits(sequence, edits[: place + 1])
                    tokens = self._encoder.tokenize(applied.sequence, applied.places[-1])
                    after[row, place] = tokens.tensor()
                    after_span[row, place] = torch.tensor([tokens.first, tokens.last])
            tensors |= {BEFORE: before, BEFORE_SPAN: before_span}
            tensors |= {AFTER: after, AFTER_SPAN: after_span}
        # Weighed by its edits, each of which has a loss: items with more of them count for more.
        counts = self._arrays["counts"][numbers]
        return Rows(tensors, weight=int(counts.sum()))

    def describe(self, item: int) -> str:
        """The window's place, and the edits; no sequence."""
        arrays = self._arrays
        place = arrays["places"][arrays["windows"][item]].decode()
        family = FAMILIES[arrays["families"][item]]
        edits = ", ".join(
            f"{one.position + 1} {one.reference.decode()}>{one.alternate.decode()}"
            for one in self.edits(item)
        )
        return f"{place}, {family} {edits}"

    def edits(self, item: int) -> list[RelativeEdit]:
        """The edits of an item, in their order."""
        arrays = self._arrays
        return [
            RelativeEdit(
                int(arrays["positions"][item, place]),
                bytes(arrays["references"][item, place]),
                bytes(arrays["alternates"][item, place]),
            )
            for place in range(int(arrays["counts"][item]))
        ]

    @cached_property
    def _actions(self) -> dict[str, npt.NDArray[Any]]:
        """The input of a predictor on the edits of all items, as small as it can be."""
        arrays = self._arrays
        references, alternates = (
            digits_of(arrays[name]) for name in ("references", "alternates")
        )
        # In small types while they wait: ``read`` widens the rows that it takes.
        most = arrays["positions"].shape[1]
        mask = np.arange(most) < arrays["counts"][:, None]
        kinds = types_of(*((one < NO_BASE).sum(-1) for one in (references, alternates)))
        return {
            POSITION: arrays["positions"],
            TYPE: np.where(mask, kinds, 0).astype(np.int8),
            REFERENCE: mers_of(references),
            ALTERNATE: mers_of(alternates),
            MASK: mask,
        }

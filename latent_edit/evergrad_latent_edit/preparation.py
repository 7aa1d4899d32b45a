"""Prepares a corpus for training: its items and, if they are cached, their states. Each content has one
folder."""

import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evergrad_latent_edit.corpus import (
    MANIFEST,
    TRAIN,
    Corpus,
    hash_file,
    read_corpus,
)
from evergrad_latent_edit.edits import AppliedEdit, apply_edits
from evergrad_latent_edit.encoder import Encoder, Tokens
from evergrad_latent_edit.features import (
    UNFINISHED_STATES,
    FeatureCache,
    States,
    compute_states,
    key_of,
)
from evergrad_latent_edit.items import FAMILIES, Item, Items, ItemTable
from evergrad_latent_edit.leaks import describe_leaks, find_leaks
from evergrad_latent_edit.tables import read_tables
from evergrad_latent_edit.windows import (
    HoldOutPolicy,
    Window,
    read_windows,
)
from evergrad_manifest.errors import Problem
from evergrad_manifest.training.latent_edit import HoldOut, LatentEdit, published_mixture
from evergrad_manifest.training.pretrain import HELD_OUT
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.lock import exclusive
from evergrad_trainer.data.preparation.disk_errors import disk_errors
from evergrad_trainer.task import Setup

FACTS: Final = "facts.json"
STATES: Final = "states.npy"
MEAN: Final = "mean.npy"
_FORMAT: Final = 1
_UNFINISHED: Final = ".tmp-"
_SECONDS_BETWEEN_LINES: Final = 5.0

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """The items of one split, made from a corpus."""

    name: str
    arrays: Arrays
    families: Counter[str]
    """Number of items of each family."""
    fallbacks: Counter[str]
    """Items whose family took another one's place."""


def array_path(folder: Path, split: str) -> Path:
    """Return the path of the file with the items of one split."""
    # A split's name comes from the corpus and may not be a valid file name, so use its hash.
    return folder / f"items-{hashlib.sha256(split.encode()).hexdigest()[:16]}.npz"


def prepare(setup: Setup, section: LatentEdit, folder: Path) -> dict[str, Any]:
    """Make a folder for this content in ``folder``, or use it if it is complete, and return its facts.

    Raises DataError if the corpus or the prepared items are not valid, and ModelError if the encoder cannot
    be used.
    """
    encoder = Encoder(setup)
    corpus = read_corpus(setup.base_directory / section.corpus, windows=section.windows)
    policy = HoldOutPolicy(section.hold_out or HoldOut.model_validate({}))
    facts = _describe(setup, section, corpus, policy, encoder)
    text = json.dumps(facts, sort_keys=True)
    final = folder / f"items-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if (final / FACTS).is_file():
        found = _read_facts(final, facts)
    else:
        maker = _Maker(setup, section, corpus, policy, encoder)
        found = _make(maker, facts, folder=folder, final=final)

    # Warn at every start about items that replace other items, and about items in two sets.
    doubts = [
        f"{name}: {count} of {split['items']} items are {pair.replace('>', ' replaced by ')}"
        for name, split in found["splits"].items()
        for pair, count in split["fallbacks"].items()
    ]
    doubts += [
        describe_leaks(name, found["splits"][name]["windows"], leaks)
        for name, leaks in found["leaks"].items()
    ]
    for line in doubts:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    return found


def _describe(
    setup: Setup,
    section: LatentEdit,
    corpus: Corpus,
    policy: HoldOutPolicy,
    encoder: Encoder,
) -> dict[str, Any]:
    """Return the facts that determine the items and their states, as JSON values without local paths.

    Raises DataError if the predictor's state width differs from the encoder's.
    """
    # Check the width before the encoder's identity, for which all weights are hashed.
    wanted, width = section.predictor.state_width, encoder.width
    if wanted is not None and wanted != width:
        where = "spec.training.latentEdit.predictor.stateWidth"
        what = f"{wanted} is not the width of a state"
        why = f"the encoder's states have {width}"
        remedy = f"Set it to {width}, leave it out, or use another encoder"
        raise DataError(Problem(where, what, why, remedy))
    mixture = section.mixture or published_mixture()
    return {
        "format": _FORMAT,
        "snapshotId": corpus.snapshot_id,
        "manifestHash": corpus.hash,
        "files": {one.name: one.sha256 for one in corpus.files},
        "holdOutHash": policy.hash,
        "mixture": [one.model_dump(mode="json", by_alias=True) for one in mixture],
        "draws": section.draws,
        "margin": section.margin,
        "seed": setup.training.reproducibility.seed_of_data,
        "features": section.features,
        "encoder": encoder.identity,
        "stateWidth": width,
    }


def _make(
    maker: "_Maker", facts: Mapping[str, Any], *, folder: Path, final: Path
) -> dict[str, Any]:
    """Make the folder ``final`` in ``folder``, and return its facts. Raises DataError and ModelError."""
    unfinished = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
    lock = exclusive(folder / ".lock", is_done=lambda: False, on_wait=lambda: None)
    with ExitStack() as held:
        with disk_errors(folder):
            # Without locks, a folder that looks left over may be in use by another node.
            if held.enter_context(lock):
                _remove_leftovers(folder)
        try:
            made = maker.make(folder, unfinished)
            with disk_errors(folder):
                found = {**facts, **made, "folder": final.name}
                (unfinished / FACTS).write_text(json.dumps(found, indent=2), "utf-8")
                shutil.copy2(maker.corpus.folder / MANIFEST, unfinished / MANIFEST)
                # Rename once, so that a folder with the final name is complete. Without locks, another node
                # may have made the same folder in the meantime; then use its folder.
                try:
                    os.rename(unfinished, final)
                except OSError:
                    if not (final / FACTS).is_file():
                        raise
                    found = _read_facts(final, facts)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return found


def _remove_leftovers(folder: Path) -> None:
    """Remove incomplete files of killed processes, for any content; no process continues them."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"states-*/{UNFINISHED_STATES.format('*')}"):
        with suppress(OSError):
            path.unlink()


def _read_facts(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a finished folder, after checking its files and comparing them with ``facts``.

    Files are checked by their SHA-256, because nodes are compared by these facts but train on the files.
    Raises DataError if they differ.
    """
    remedy = f"Delete the folder {folder}: it is made again"
    try:
        found: dict[str, Any] = json.loads((folder / FACTS).read_text("utf-8"))
        for name, digest in found["made"].items():
            if hash_file(folder / name) != digest:
                raise ValueError(f"{name} does not have the SHA-256 {digest}")
        if {key: found[key] for key in facts} != json.loads(json.dumps(facts)):
            raise ValueError(f"{FACTS} is of other settings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = "the prepared items are damaged"
        raise DataError(Problem(str(folder), what, str(error), remedy)) from error
    return found


@dataclass(frozen=True)
class _Maker:
    """Makes the folder of one content."""

    setup: Setup
    section: LatentEdit
    corpus: Corpus
    policy: HoldOutPolicy
    encoder: Encoder

    def make(self, folder: Path, unfinished: Path) -> dict[str, Any]:
        """Write everything except the facts into ``unfinished``, and return the additional facts.

        Raises DataError and ModelError.
        """
        windows = read_windows(self.corpus.windows(), self.policy)
        wanted: dict[bytes, Tokens] = {}
        passed_over: dict[str, dict[str, int]] = {}
        splits = []
        for name, own in windows.items():
            items = self._items(name, own, passed_over)
            splits.append(self._split(name, items, wanted))
        # With ``features: live``, a step encodes its batches, which must have one shape.
        lengths = {len(one.ids) for one in wanted.values()}
        if self.section.features == "live" and len(lengths) > 1:
            what = f"windows have {min(lengths)} to {max(lengths)} tokens"
            why = "states that are computed in each step need sequences of one length"
            remedy = (
                "Set features: cached, or use a tokenizer of bases or fixed groups of them"
            )
            where = "spec.training.latentEdit.features"
            raise DataError(Problem(where, what, why, remedy))

        states: States | None = None
        if self.section.features == "cached":
            states = self._states(folder, wanted)
        with disk_errors(folder):
            unfinished.mkdir(parents=True)
            for split in splits:
                path = array_path(unfinished, split.name)
                arrays = split.arrays
                if states is None:
                    arrays = {key: value for key, value in arrays.items() if key != "rows"}
                save: Any = np.savez
                save(path, **arrays)
            if states is not None:
                np.save(unfinished / STATES, states)
                np.save(unfinished / MEAN, _mean_target(splits[0], states))
            hashes = {path.name: hash_file(path) for path in sorted(unfinished.iterdir())}
        # Live states are identified by the encoder, so that nodes with different weights cannot be peers.
        content = self.encoder.identity
        if states is not None:
            content = hashlib.sha256(states.tobytes()).hexdigest()
        return {
            "made": hashes,
            "tokens": max(lengths),
            "passedOver": passed_over,
            "leaks": {
                name: leaks
                for name, own in windows.items()
                if name != TRAIN and (leaks := find_leaks(windows[TRAIN], own))
            },
            "splits": {one.name: _summarize(one, content) for one in splits},
        }

    def _items(
        self, name: str, windows: Sequence[Window], passed_over: dict[str, dict[str, int]]
    ) -> Items:
        mixture = self.section.mixture or published_mixture()
        tables = {}
        for family in ("population", "clinical"):
            if not any(quota.family == family for quota in mixture):
                continue
            # Remove held-out edits only from the training split; held-out windows keep their rows.
            policy = self.policy if name == TRAIN else None
            files = self.corpus.tables(family)
            split = TRAIN if name == HELD_OUT else name
            table = read_tables(files, family, split=split, policy=policy)
            tables[family] = ItemTable.of(table.edits)
            if table.passed_over:
                passed_over[f"{name}/{family}"] = dict(table.passed_over)
        return Items(
            windows,
            mixture,
            tables,
            draws=self.section.draws,
            margin=self.section.margin,
            seed=self.setup.training.reproducibility.seed_of_data,
            held_out=self.policy.edits if name == TRAIN else frozenset(),
        )

    def _split(self, name: str, items: Items, wanted: dict[bytes, Tokens]) -> Split:
        """Return all items of a split, and add the sequences that the encoder must read to ``wanted``."""
        numbers = {key: number for number, key in enumerate(wanted)}
        most = max(quota.edits for quota in items.mixture)
        num_items, bases = len(items), len(items.windows[0].sequence)
        sequences = b"".join(window.sequence for window in items.windows)
        places = [window.place.encode() for window in items.windows]
        # Each item is a row. The columns of edits that an item does not have stay empty, without a state.
        arrays: Arrays = {
            "sequences": np.frombuffer(sequences, dtype=np.uint8).reshape(-1, bases).copy(),
            "places": np.array(places, dtype=np.bytes_),
            "windows": np.zeros(num_items, dtype=np.int32),
            "families": np.zeros(num_items, dtype=np.int8),
            "counts": np.zeros(num_items, dtype=np.int8),
            "positions": np.zeros((num_items, most), dtype=np.int32),
            "references": np.zeros((num_items, most), dtype="S16"),
            "alternates": np.zeros((num_items, most), dtype="S16"),
            "rows": np.full((num_items, 1 + most), -1, dtype=np.int64),
        }
        families, fallbacks = Counter[str](), Counter[str]()

        def number_of(sequence: bytes, focus: int | None) -> int:
            tokens = self.encoder.tokenize(sequence, focus)
            key = key_of(tokens)
            wanted.setdefault(key, tokens)
            return numbers.setdefault(key, len(numbers))

        before = [number_of(window.sequence, None) for window in items.windows]
        for index in range(num_items):
            item = items.item(index)
            families[item.family] += 1
            if item.family != item.asked:
                fallbacks[f"{item.asked}>{item.family}"] += 1
            fill_row(arrays, index, item)
            arrays["rows"][index, 0] = before[item.window]
            for place, one in enumerate(
                after_edits(items.windows[item.window].sequence, item)
            ):
                arrays["rows"][index, 1 + place] = number_of(one.sequence, one.places[-1])
        return Split(name, arrays, families, fallbacks)

    def _states(self, folder: Path, wanted: Mapping[bytes, Tokens]) -> States:
        cache = FeatureCache(folder, self.encoder.identity)
        last = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES or (
                done == total and total > 1000
            ):
                last = time.monotonic()
                print(
                    f"encoding: {done:,} of {total:,} states", file=sys.stderr, flush=True
                )

        found = compute_states(self.encoder, wanted, cache, on_progress=show)
        return np.stack([found[key] for key in wanted])


def after_edits(sequence: bytes, item: Item) -> list[AppliedEdit]:
    """Return the sequence after the first edit of an item, after the first two edits, and so on."""
    return [
        apply_edits(sequence, item.edits[: number + 1]) for number in range(len(item.edits))
    ]


def fill_row(arrays: Arrays, index: int, item: Item) -> None:
    """Write an item into row ``index`` of the arrays."""
    arrays["windows"][index] = item.window
    arrays["families"][index] = FAMILIES.index(item.family)
    arrays["counts"][index] = len(item.edits)
    for place, edit in enumerate(item.edits):
        arrays["positions"][index, place] = edit.position
        arrays["references"][index, place] = edit.reference
        arrays["alternates"][index, place] = edit.alternate


def _mean_target(split: Split, states: States) -> States:
    """Return the mean of all states after edits in the training split: the second trivial baseline."""
    rows = split.arrays["rows"][:, 1:]
    counts = np.bincount(rows[rows >= 0], minlength=len(states)).astype(np.float64)
    # Do not use a matrix library (``optimize=False``), because its sums depend on the number of threads.
    total = np.einsum("i,ij->j", counts, states.astype(np.float64), optimize=False)
    mean: States = (total / counts.sum()).astype(np.float32)
    return mean


def _summarize(split: Split, states: str) -> dict[str, Any]:
    digest = hashlib.sha256(states.encode())
    for name in sorted(split.arrays):
        array = split.arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return {
        "sha256": digest.hexdigest(),
        "windows": len(split.arrays["sequences"]),
        "items": len(split.arrays["windows"]),
        "families": dict(split.families),
        "fallbacks": dict(split.fallbacks),
    }

"""Edits and their application, and items as a function of their index alone."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from latent_corpus import LENGTH, bases

from evergrad_latent_edit.draws import Draws
from evergrad_latent_edit.edits import (
    Edit,
    EditError,
    EditType,
    RelativeEdit,
    apply_edits,
    relative,
    type_of,
)
from evergrad_latent_edit.items import Items, ItemTable
from evergrad_latent_edit.windows import Window
from evergrad_manifest.training.latent_edit import EditQuota, published_mixture
from evergrad_trainer.base.errors import DataError


def edit(position: int, reference: str, alternate: str) -> RelativeEdit:
    return RelativeEdit(position, reference.encode(), alternate.encode())


@pytest.mark.capability("G-40")
@pytest.mark.parametrize(
    ("reference", "alternate", "expected"),
    [
        ("A", "C", EditType.SNV),
        ("A", "ACC", EditType.INSERTION),
        ("ACC", "A", EditType.DELETION),
        ("AC", "GT", EditType.MNV),
        ("AC", "GTT", EditType.INDEL),
        ("A" * 17, "A", EditType.STRUCTURAL),
    ],
)
def test_the_type_of_an_edit_follows_from_its_lengths(
    reference: str, alternate: str, expected: EditType
) -> None:
    assert type_of(reference, alternate) == expected


@pytest.mark.acceptance("input-G-40")
@pytest.mark.capability("G-40")
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Edit("chr1", 0, "A", "C"), "position 0 is below 1"),
        (Edit("chr1", 1, "", "C"), "reference is not a text of A, C, G and T"),
        (Edit("chr1", 1, "a", "C"), "reference is not a text of A, C, G and T"),
        (Edit("chr1", 1, "A", "N"), "alternate is not a text of A, C, G and T"),
        (Edit("chr1", 1, "A", "A"), "reference and alternate are equal"),
        (Edit("chr1", 1, "A", "A" * 17), "an allele is longer than 16 bases"),
    ],
)
def test_an_invalid_edit_is_refused(row: Edit, reason: str) -> None:
    with pytest.raises(EditError, match=reason):
        row.check()


@pytest.mark.acceptance("input-1e-16")
@pytest.mark.capability("G-41")
def test_positions_count_from_1_and_windows_from_0_half_open() -> None:
    assert relative(Edit("c", 101, "A", "C"), start=100, length=4) == edit(0, "A", "C")
    assert relative(Edit("c", 103, "AC", "C"), start=100, length=4) == edit(2, "AC", "C")
    for outside in (Edit("c", 100, "A", "C"), Edit("c", 104, "AC", "C")):
        with pytest.raises(EditError, match="does not lie inside the window"):
            relative(outside, start=100, length=4)


@pytest.mark.capability("G-42")
@pytest.mark.parametrize(
    ("edits", "expected", "places"),
    [
        ([edit(1, "C", "T")], "ATGTACGT", [1]),
        # In the left half the right end gives way, or is filled up; in the right half the left one.
        ([edit(1, "C", "CAA")], "ACAAGTAC", [1]),
        ([edit(1, "CGT", "C")], "ACACGTNN", [1]),
        ([edit(6, "G", "GAA")], "GTACGAAT", [4]),
        ([edit(5, "CGT", "C")], "NNACGTAC", [7]),
        # Both at the same time, with positions before either edit.
        ([edit(6, "G", "A"), edit(1, "C", "CA")], "ACAGTACA", [7, 1]),
        ([edit(1, "CG", "C"), edit(5, "C", "CA")], "CTACAGTN", [0, 3]),
    ],
)
def test_an_edited_window_keeps_its_length(
    edits: list[RelativeEdit], expected: str, places: list[int]
) -> None:
    applied = apply_edits(b"ACGTACGT", edits)
    assert applied.sequence.decode() == expected
    assert list(applied.places) == places


@pytest.mark.acceptance("8d-11g:latent_edit", "input-G-41")
@pytest.mark.capability("G-42")
def test_edits_that_do_not_match_the_window_are_refused() -> None:
    with pytest.raises(EditError, match="is not what stands there"):
        apply_edits(b"ACGT", [edit(0, "C", "G")])
    with pytest.raises(EditError, match="overlap"):
        apply_edits(b"ACGT", [edit(0, "ACG", "A"), edit(2, "G", "C")])
    with pytest.raises(EditError, match="does not lie inside"):
        apply_edits(b"ACGT", [edit(3, "TA", "T")])


@pytest.mark.acceptance("number-G-45")
@pytest.mark.capability("G-45")
def test_insertion_lengths_halve_in_frequency_and_end_at_fifteen() -> None:
    draws = Draws(5)
    counts = Counter(draws.indel_length() for _ in range(65_536))
    assert set(counts) <= set(range(1, 16))
    for length in (1, 2, 3, 4):
        assert counts[length] == pytest.approx(65_536 / 2**length, rel=0.1)


def windows(count: int = 3, *, is_placed: bool = True) -> list[Window]:
    return [
        Window(
            record_id=f"w{number}",
            sequence=bases(LENGTH, seed=number).encode(),
            place=f"placed/train.jsonl:{number + 1}",
            chromosome="chr1" if is_placed else None,
            start=number * LENGTH,
        )
        for number in range(count)
    ]


def table(own: list[Window], per_window: int) -> ItemTable:
    """Substitutions at 10, 14, … of each window."""
    rows = {}
    for window in own:
        for number in range(per_window):
            position = 10 + 4 * number
            old = chr(window.sequence[position])
            new = next(one for one in "ACGT" if one != old)
            row = Edit("chr1", window.start + position + 1, old, new)
            rows[row.key] = row
    return ItemTable.of(rows)


def items(
    own: list[Window] | None = None,
    *,
    population: int = 5,
    clinical: int = 1,
    mixture: list[dict[str, Any]] | None = None,
    draws: int = 1,
    seed: int = 7,
) -> Items:
    own = windows() if own is None else own
    return Items(
        own,
        tuple(map(EditQuota.model_validate, mixture)) if mixture else published_mixture(),
        {"population": table(own, population), "clinical": table(own, clinical)},
        draws=draws,
        margin=8,
        seed=seed,
    )


@pytest.mark.acceptance("8d-11e:latent_edit", "number-G-47")
@pytest.mark.capability("G-24", "G-47")
def test_each_window_has_three_three_one_and_one_edits_in_this_order() -> None:
    own = items()
    families = [own.item(index).family for index in range(len(own))]
    expected = ["population"] * 3 + ["syntheticSnv"] * 3 + ["syntheticIndel", "clinical"]
    assert families == expected * 3
    assert [own.item(index).window for index in range(len(own))] == [0] * 8 + [1] * 8 + [
        2
    ] * 8


@pytest.mark.capability("G-43")
def test_rows_of_one_draw_differ_and_are_inside_their_window() -> None:
    own = items(draws=4)
    for number, draw in itertools.product(range(3), range(4)):
        first = (number * 4 + draw) * own.per_draw
        chosen = [own.item(first + place).edits[0] for place in range(3)]
        assert len(set(chosen)) == 3
        for one in chosen:
            apply_edits(own.windows[number].sequence, [one])
    draws = [
        tuple(own.item(draw * 8 + place).edits for place in range(3)) for draw in range(4)
    ]
    assert len(set(draws)) > 1, "another draw is shuffled anew"


@pytest.mark.capability("G-25", "G-50")
def test_an_item_depends_only_on_index_seed_and_window_content() -> None:
    own = items(draws=3)
    known = [own.item(index) for index in range(len(own))]
    # In any order, and by another process that has made no item before.
    assert [items(draws=3).item(index) for index in reversed(range(len(own)))] == known[
        ::-1
    ]
    assert items(draws=3).item(41) == known[41]
    # Neither the other windows nor the place among them decides.
    alone = items(windows()[1:2], draws=3)
    assert [one.edits for one in map(alone.item, range(24))] == [
        one.edits for one in known[24:48]
    ]
    assert [items(draws=3, seed=8).item(index) for index in range(len(own))] != known


@pytest.mark.acceptance("number-G-44")
@pytest.mark.capability("G-44", "G-45", "G-46")
def test_synthetic_edits_avoid_the_margins_and_unknown_bases() -> None:
    own = windows(1)
    middle = own[0].sequence[:20] + b"N" * 6 + own[0].sequence[26:]
    own = [Window("w", middle, "w:1")]
    mixture = [
        {"family": name, "count": 60}
        for name in ("syntheticSnv", "syntheticIndel", "syntheticMnv")
    ]
    made = items(own, mixture=mixture)
    kinds = Counter[EditType]()
    for index in range(len(made)):
        (one,) = made.item(index).edits
        assert one.position >= 8 and one.end <= LENGTH - 8
        assert b"N" not in one.reference + one.alternate and one.reference != one.alternate
        assert len(apply_edits(middle, [one]).sequence) == LENGTH
        kinds[one.type] += 1
        if index >= 120:
            assert 2 <= len(one.reference) == len(one.alternate) <= 8
    assert kinds[EditType.SNV] == kinds[EditType.MNV] == 60
    assert kinds[EditType.INSERTION] + kinds[EditType.DELETION] == 60
    assert min(kinds[EditType.INSERTION], kinds[EditType.DELETION]) > 5


@pytest.mark.capability("G-50")
def test_a_held_out_edit_is_not_drawn_either() -> None:
    mixture = [{"family": "syntheticSnv", "count": 60}]
    own = windows(1)
    free = items(own, mixture=mixture)
    drawn = [own[0].key_of(free.item(place).edits[0]) for place in range(60)]
    held = frozenset(drawn[:20])
    rest = dataclasses.replace(free, held_out=held)
    keys = [own[0].key_of(rest.item(place).edits[0]) for place in range(60)]
    assert not held & set(keys)
    # Every other item stays as it was.
    assert all(
        one == other for one, other in zip(drawn, keys, strict=True) if one not in held
    )
    assert own[0].key_of(edit(4, "A", "C")) == "chr1:5:A:C"
    # A window without coordinates has no edit that a hold-out could name.
    assert windows(1, is_placed=False)[0].key_of(edit(4, "A", "C")) == ""


@pytest.mark.acceptance("8d-11f:latent_edit")
@pytest.mark.capability("G-48")
def test_a_fallback_replaces_missing_rows_and_is_reported() -> None:
    own = items(clinical=0)
    last = own.item(7)
    assert (last.asked, last.family) == ("clinical", "syntheticSnv")
    assert last.edits[0].type == EditType.SNV
    # At its own place: it does not repeat what the synthetic family draws.
    assert last.edits not in [own.item(place).edits for place in range(3, 6)]


@pytest.mark.acceptance("8d-11f:latent_edit", "input-G-49", "input-1e-13")
@pytest.mark.capability("G-49")
def test_missing_rows_without_a_fallback_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        items(population=2).item(2)
    said = str(caught.value)
    assert said.startswith(
        "placed/train.jsonl:1: has too few population edits for 3; it has 2."
    )
    assert "give population a fallback" in said
    # Windows without coordinates have no rows at all.
    with pytest.raises(DataError, match="has too few population edits"):
        items(windows(is_placed=False)).item(0)


@pytest.mark.capability("G-X41")
def test_edit_types_have_the_frequencies_configured_for_their_families() -> None:
    shares = {"syntheticSnv": 4, "syntheticIndel": 4, "syntheticMnv": 1}
    made = items(
        mixture=[{"family": name, "count": count} for name, count in shares.items()]
    )
    types = [made.item(index).edits[0].type for index in range(len(made))]
    assert len(types) == 3 * 9
    assert (types.count(EditType.SNV), types.count(EditType.MNV)) == (12, 3)


@pytest.mark.acceptance("8d-11g:latent_edit")
@pytest.mark.capability("G-77", "G-78", "G-X42")
def test_several_edits_of_an_item_do_not_overlap() -> None:
    mixture = [
        {"family": "population", "count": 2, "edits": 2},
        {"family": "syntheticIndel", "count": 3, "edits": 3},
    ]
    own = items(mixture=mixture, population=5)
    for index in range(len(own)):
        item = own.item(index)
        assert len(item.edits) == (2 if index % 5 < 2 else 3)
        apply_edits(own.windows[item.window].sequence, item.edits)

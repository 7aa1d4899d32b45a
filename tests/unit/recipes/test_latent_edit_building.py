"""Tools that build a corpus, and windows of an evaluation set that are also trained on."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from latent_corpus import bases, write_corpus

from evergrad_latent_edit.building import (
    is_kept,
    list_memberships,
    mix_rows,
    sample_windows,
    write_manifest,
)
from evergrad_latent_edit.corpus import read_corpus
from evergrad_latent_edit.leaks import describe_leaks, find_leaks
from evergrad_latent_edit.windows import Window
from evergrad_trainer.base.errors import DataError

pytestmark = pytest.mark.capability("G-56")


def test_windows_avoid_the_ends_of_a_chromosome_and_follow_in_strides() -> None:
    text = bases(20_000)
    rows = list(sample_windows(text, chromosome="chr3", length=512, source="toy"))
    assert [row["start_bp"] for row in rows] == [256, 256 + 8192, 256 + 2 * 8192]
    assert rows[1]["sequence"] == text[8448:8960]
    assert rows[1]["record_id"] == "toy-chr3-8448"
    # The last window ends at the margin, and with one base less it would not fit.
    for length, expected in ((22, 2), (21, 1)):
        own = sample_windows(
            text[:length], chromosome="c", length=8, source="t", margin=3, stride=8
        )
        assert len(list(own)) == expected
    with pytest.raises(ValueError, match="no window is cut like that"):
        list(sample_windows(text, chromosome="c", length=0, source="t"))


def test_windows_with_more_than_a_tenth_of_unknown_bases_are_skipped() -> None:
    text = "A" * 19 + "n" * 2 + "C" * 19 + "N" * 3 + "G" * 17
    rows = sample_windows(text, chromosome="c", length=20, source="t", margin=0, stride=20)
    # One unknown base of twenty, one again, and three.
    assert [row["start_bp"] for row in rows] == [0, 20]


def test_a_subset_depends_on_no_other_name_and_is_part_of_a_larger_one() -> None:
    names = [f"w-{number}" for number in range(4000)]
    small, large = (
        {name for name in names if is_kept(name, fraction=share)}
        for share in (Fraction(1, 10), 0.3)
    )
    assert small < large
    assert len(small) == pytest.approx(400, rel=0.15)
    assert len(large) == pytest.approx(1200, rel=0.15)
    other = {name for name in names if is_kept(name, fraction=Fraction(1, 10), salt="b")}
    assert len(small & other) < 80, "another salt is another choice"
    assert all(
        is_kept(name, fraction=1) and not is_kept(name, fraction=0) for name in names
    )


def test_a_mixture_has_the_exact_fractions_of_its_sources() -> None:
    sources = {
        name: [{"record_id": f"{name}-{number}"} for number in range(10)] for name in "abc"
    }
    thirds = dict.fromkeys("abc", Fraction(1, 3))
    rows = mix_rows(sources, thirds, 10)
    counts = [sum(row["record_id"].startswith(name) for row in rows) for name in "abc"]
    assert counts == [4, 3, 3]
    # The order of the rows decides nothing, and a larger mixture has all rows of a smaller one.
    reversed_rows = mix_rows({name: own[::-1] for name, own in sources.items()}, thirds, 10)
    assert reversed_rows == rows
    assert [row for row in mix_rows(sources, thirds, 12) if row in rows] == rows
    with pytest.raises(DataError, match="a: has 10 rows; 15 are wanted"):
        mix_rows(sources, thirds, 45)
    with pytest.raises(DataError, match="are no mixture; the sources are a, b, c"):
        mix_rows(sources, {"a": Fraction(1, 2), "b": Fraction(1, 2)}, 4)


def window(start: int, *, chromosome: str | None = "chr1", seed: int = 0) -> Window:
    return Window(
        f"w-{start}", bases(10, seed=seed).encode(), "", chromosome=chromosome, start=start
    )


def test_windows_that_are_also_trained_on_are_counted() -> None:
    train = [window(0, seed=1), window(100, seed=2), window(50, seed=3)]
    assert (
        find_leaks(train, [window(10, seed=4), window(40, seed=5), window(110, seed=6)])
        == {}
    )
    # By one base at either end, and from inside another chromosome not at all.
    other = [
        window(9, seed=4),
        window(41, seed=5),
        window(91, seed=6),
        window(50, chromosome="chr2", seed=7),
    ]
    assert find_leaks(train, other) == {"overlapping": 3}
    same = [window(500, seed=2), window(0, chromosome=None, seed=1), window(100, seed=2)]
    assert find_leaks(train, same) == {"sameSequence": 3, "overlapping": 1}
    said = describe_leaks("test", 3, find_leaks(train, same))
    assert said.startswith(
        "test: of 3 windows 3 have the sequence of, 1 overlap one that is"
    )


def test_a_written_manifest_is_accepted_by_a_run(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    (folder / "dataset_manifest.json").unlink()
    splits = {f"{kind}/test.jsonl": "test" for kind in ("placed", "gnomad", "clinvar")}
    write_manifest(folder, snapshot_id="toy-2", splits=splits)
    corpus = read_corpus(folder, windows=None)
    assert corpus.snapshot_id == "toy-2"
    assert {one.name: one.split for one in corpus.files if "test" in one.name} == splits
    assert sum(one.split is None for one in corpus.files) == 3
    with pytest.raises(DataError, match=r"placed/none.jsonl: is not there"):
        write_manifest(folder, snapshot_id="x", splits={"placed/none.jsonl": "test"})
    raw = json.loads((folder / "dataset_manifest.json").read_text("utf-8"))
    assert raw["snapshot_id"] == "toy-2", "what is refused replaces nothing"


def test_memberships_identify_windows_by_hash_and_contain_no_sequence() -> None:
    splits = {"train": [window(0, seed=1)], "test": [window(100, seed=2)]}
    rows = list(list_memberships(splits))
    assert rows == [
        {"window": own[0].id, "record_id": own[0].record_id, "split": name}
        for name, own in splits.items()
    ]
    assert bases(10, seed=1) not in json.dumps(rows)

"""The description of a corpus is compared with its files, and every difference is reported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latent_corpus import LENGTH, bases, seal, window_row, write_corpus, write_lines

from evergrad_latent_edit.corpus import read_corpus, why_unsafe
from evergrad_latent_edit.edits import Edit
from evergrad_latent_edit.tables import read_tables
from evergrad_latent_edit.windows import HoldOutPolicy, read_windows
from evergrad_manifest.training.latent_edit import HoldOut
from evergrad_trainer.base.errors import DataError

Change = Callable[[dict[str, Any]], None]


def policy(**settings: Any) -> HoldOutPolicy:
    return HoldOutPolicy(HoldOut.model_validate(settings))


def first_file(**values: Any) -> Change:
    """A change of the first entry; None removes a key."""

    def change(manifest: dict[str, Any]) -> None:
        for key, value in values.items():
            manifest["files"][0][key] = value
            if value is None:
                del manifest["files"][0][key]

    return change


@pytest.mark.capability("G-3", "G-16", "G-17", "G-34", "G-X8")
def test_a_corpus_is_identified_by_its_snapshot_and_the_content_of_its_files(
    tmp_path: Path,
) -> None:
    corpus = read_corpus(write_corpus(tmp_path), windows=None)
    assert corpus.snapshot_id == "toy-snap-1" and len(corpus.hash) == 64
    kinds = {one.name: (one.kind, one.split, one.is_train) for one in corpus.files}
    assert kinds["placed/train.jsonl"] == ("placed", "train", True)
    assert kinds["gnomad/test.jsonl"] == ("population", "test", False)
    assert kinds["clinvar/train.jsonl"] == ("clinical", "train", True)


@pytest.mark.acceptance("input-G-16", "input-G-18", "input-G-38")
@pytest.mark.capability("G-16", "G-17", "G-34", "G-38", "G-X15", "G-X16")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.pop("snapshot_id"), "snapshot_id is missing; it names the state"),
        (lambda raw: raw.update(snapshot_id=" "), "snapshot_id is not a text"),
        (lambda raw: raw.update(snapshot_id=7), "snapshot_id is not a text"),
        (lambda raw: raw.update(files=[]), "files is no list with an entry"),
        (lambda raw: raw.update(files=["a"]), "files[0]: is not an object"),
        (first_file(path=None), "files[0].path: is not a text"),
        (first_file(path="/etc/passwd"), "files[0].path: '/etc/passwd' is not relative"),
        (first_file(path="placed/../x"), "'placed/../x' has a parent segment"),
        (first_file(path="./placed"), "'./placed' is not written in its plain form"),
        (first_file(path="a\\b"), "is not relative"),
        (first_file(path="placed/none.jsonl"), "does not exist"),
        (
            first_file(sha256=None),
            "files[0].sha256: is missing; what was trained on is known",
        ),
        (first_file(sha256="md5:1"), "files[0].sha256: is not a SHA-256"),
        (first_file(sha256="0" * 64), "has the SHA-256"),
        (first_file(size_bytes=1), "bytes; "),
        (first_file(records=True), "files[0].records: is no count"),
        (first_file(split=""), "files[0].split: is not a text"),
        (first_file(split="../x"), "files[0].split: '../x' is no name; an evaluation set"),
        (
            first_file(split="heldout"),
            "files[0].split: 'heldout' is taken; it is the set of",
        ),
        (lambda raw: raw["files"].append(raw["files"][0]), "is listed twice"),
    ],
)
def test_problems_of_a_manifest_are_reported(
    tmp_path: Path, change: Change, said: str
) -> None:
    write_corpus(tmp_path)
    seal(tmp_path, change)
    with pytest.raises(DataError) as caught:
        read_corpus(tmp_path, windows=None)
    assert said in str(caught.value)
    # Place, reason and remedy.
    assert all(problem.path and problem.remedy for problem in caught.value.problems)


def test_all_problems_of_a_manifest_are_reported_together(tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["snapshot_id"] = ""
        raw["files"][0]["sha256"] = "0" * 64
        raw["files"][1]["path"] = "../x"

    write_corpus(tmp_path)
    with pytest.raises(DataError) as caught:
        read_corpus(seal(tmp_path, change), windows=None)
    assert len(caught.value.problems) == 3


@pytest.mark.capability("G-X15")
@pytest.mark.acceptance("input-G-16")
def test_a_manifest_that_is_missing_or_not_json_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_corpus(tmp_path, windows=None)
    (tmp_path / "dataset_manifest.json").write_text("{", "utf-8")
    with pytest.raises(DataError, match="is no JSON"):
        read_corpus(tmp_path, windows=None)


@pytest.mark.acceptance("input-G-38")
@pytest.mark.capability("G-38")
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder)
    outside = tmp_path / "outside.jsonl"
    (folder / "placed/train.jsonl").rename(outside)
    (folder / "placed/train.jsonl").symlink_to(outside)
    with pytest.raises(DataError, match="leads out of the folder"):
        read_corpus(folder, windows=None)


def test_an_unlisted_file_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "gnomad/more.jsonl").write_text("{}", "utf-8")
    (tmp_path / "README.md").write_text("of nobody's concern", "utf-8")
    with pytest.raises(
        DataError, match=r"more.jsonl: is not a part of the corpus; .*not list it"
    ):
        read_corpus(tmp_path, windows=None)


@pytest.mark.acceptance("input-1e-14")
@pytest.mark.capability("G-36")
def test_the_kind_of_windows_is_required_if_there_are_two_kinds(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    rows = [{"record_id": "free-1", "sequence": bases(LENGTH)}]
    write_lines(tmp_path / "carbon/train.jsonl", rows)
    seal(tmp_path)
    with pytest.raises(
        DataError, match=r"latentEdit.windows: missing, and .* placed/ and of"
    ):
        read_corpus(tmp_path, windows=None)
    for kind in ("placed", "carbon"):
        found = read_corpus(tmp_path, windows=kind)
        assert {one.kind for one in found.windows()} == {kind}
    (tmp_path / "carbon/train.jsonl").unlink()
    seal(tmp_path)
    with pytest.raises(DataError, match="lists no file of carbon/"):
        read_corpus(tmp_path, windows="carbon")


@pytest.mark.capability("G-18", "G-35", "G-39")
def test_windows_are_read_with_their_position_and_in_upper_case(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, train=3, test=2)
    path = folder / "placed/train.jsonl"
    path.write_text("\n" + path.read_text("utf-8").lower(), "utf-8")
    seal(folder, lambda raw: [one.pop("records", None) for one in raw["files"]] and None)
    found = read_windows(read_corpus(folder, windows=None).windows(), policy())
    assert [*found] == ["train", "test"] and [len(found[name]) for name in found] == [3, 2]
    second = found["train"][1]
    assert (second.chromosome, second.start, second.end) == ("chr1", LENGTH, 2 * LENGTH)
    assert second.place == "placed/train.jsonl:3", "blank lines are passed over"
    assert not set(second.sequence) - set(b"ACGTN") and len(second.id) == 64


@pytest.mark.acceptance("8d-12d:latent_edit", "input-G-35")
@pytest.mark.capability("G-35")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"sequence": x}', "placed/train.jsonl:1: is no JSON, at column 14"),
        ("[]", "placed/train.jsonl:1: holds no object"),
        ('{"chrom": "c"}', "sequence is missing"),
        ('{"chrom": "c", "sequence": 7}', "sequence is not a text of bases"),
        ('{"chrom": "c", "sequence": "ACGU"}', "sequence has another letter at 4"),
        ('{"sequence": "ACGT"}', "chrom is missing; windows of placed/ have coordinates"),
        ('{"chrom": "c", "sequence": "ACGT", "start_bp": -1}', "start_bp is no count"),
    ],
)
def test_an_invalid_window_is_reported_with_file_and_line(
    tmp_path: Path, line: str, said: str
) -> None:
    folder = write_corpus(tmp_path)
    (folder / "placed/train.jsonl").write_text(line + "\n", "utf-8")
    seal(folder)
    with pytest.raises(DataError) as caught:
        read_windows(read_corpus(folder, windows=None).windows(), policy())
    assert said in str(caught.value)


@pytest.mark.acceptance("8d-15e:latent_edit")
@pytest.mark.capability("G-99")
def test_no_message_shows_a_sequence(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    secret = "ACGT" * 10
    rows = [window_row(1, secret), window_row(1, secret + "A"), window_row(2, secret + "U")]
    write_lines(folder / "placed/train.jsonl", rows)
    seal(folder)
    with pytest.raises(DataError) as caught:
        read_windows(read_corpus(folder, windows=None).windows(), policy())
    said = str(caught.value)
    assert secret[:20] not in said
    assert (
        "is not the only one" in said
        and "Cut all windows of a corpus to one length" in said
    )


def test_counts_that_differ_from_the_manifest_are_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)

    def change(raw: dict[str, Any]) -> None:
        for entry in raw["files"]:
            entry["records"] = 99

    corpus = read_corpus(seal(folder, change), windows=None)
    with pytest.raises(DataError, match=r"has 6 windows; the corpus's manifest says 99"):
        read_windows(corpus.windows(), policy())
    with pytest.raises(DataError, match=r"has 24 rows; the corpus's manifest says 99"):
        read_tables(corpus.tables("population"), "population", split="train", policy=None)


@pytest.mark.capability("G-50", "G-X21")
def test_held_out_windows_are_a_separate_set_and_never_trained_on(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path), windows=None)

    def split(**settings: Any) -> dict[str, int]:
        found = read_windows(corpus.windows(), policy(**settings))
        return {name: len(own) for name, own in found.items()}

    assert split() == {"train": 6, "test": 2}
    assert split(records=["w-chr1-2"]) == {"train": 5, "heldOut": 1, "test": 2}
    # From the last base of the first window to the first one of the third.
    interval = f"chr1:{LENGTH}-{2 * LENGTH + 1}"
    assert split(intervals=[interval]) == {"heldOut": 3, "train": 3, "test": 2}
    with pytest.raises(DataError, match="have no window to train on"):
        split(chromosomes=["chr1"])

    tables = corpus.tables("population")
    whole = read_tables(tables, "population", split="train", policy=policy())
    key = next(iter(whole.edits))
    held = policy(edits=[key], intervals=["chr1:1-20"])
    rest = read_tables(tables, "population", split="train", policy=held)
    assert key not in rest.edits and len(rest.edits) == 22
    assert rest.passed_over == {"heldOut": 2}


@pytest.mark.capability("G-50")
def test_the_hash_of_a_hold_out_depends_on_its_meaning() -> None:
    one = policy(chromosomes=["chr2", "chr1"], records=["a"])
    other = policy(chromosomes=["chr1", "chr2", "chr1"], records=["a"])
    assert one.hash == other.hash != policy().hash
    assert one.meets_edit(Edit("chr2", 5, "A", "C"))


@pytest.mark.acceptance("number-G-54")
@pytest.mark.capability("G-19", "G-37", "G-54")
def test_common_variants_are_used_and_others_are_skipped_and_counted(
    tmp_path: Path,
) -> None:
    folder = write_corpus(tmp_path)
    base = {"chrom": "chr1", "pos": 5, "ref": "A", "alt": "C", "af_global": 0.01}
    rows = [
        {**base, "filter": "PASS"},
        {**base, "filter": "PASS"},
        {**base, "filter": "RF", "pos": 6},
        {**base, "filter": "PASS", "af_global": 0.0099, "pos": 7},
        {**base, "filter": "PASS", "pos": 8, "alt": "C" * 17},
    ]
    write_lines(folder / "gnomad/train.jsonl", rows)
    corpus = read_corpus(seal(folder), windows=None)
    found = read_tables(
        corpus.tables("population"), "population", split="train", policy=None
    )
    assert [*found.edits] == ["chr1:5:A:C"]
    assert found.passed_over == {"repeated": 1, "filter": 1, "rare": 1, "longAllele": 1}


@pytest.mark.capability("G-20", "G-37", "G-55")
def test_tables_may_be_parquet_files_and_clinical_tables_have_their_significance_terms(
    tmp_path: Path,
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = write_corpus(tmp_path)
    (folder / "clinvar/train.jsonl").unlink()
    columns = {
        "chrom": ["chr1", "chr1"],
        "pos": [5, 9],
        "ref": ["A", "CA"],
        "alt": ["G", "C"],
        "clinical_significance": ["VUS", "P"],
        "gene_symbol": ["TOY1", None],
    }
    parquet.write_table(pyarrow.table(columns), folder / "clinvar/train.parquet")
    corpus = read_corpus(seal(folder), windows=None)
    found = read_tables(corpus.tables("clinical"), "clinical", split="train", policy=None)
    assert [*found.edits] == ["chr1:5:A:G", "chr1:9:CA:C"]

    columns["clinical_significance"] = ["VUS", "bad"]
    parquet.write_table(pyarrow.table(columns), folder / "clinvar/train.parquet")
    corpus = read_corpus(seal(folder), windows=None)
    with pytest.raises(DataError, match=r"train.parquet:2: clinical_significance is 'bad'"):
        read_tables(corpus.tables("clinical"), "clinical", split="train", policy=None)
    del columns["alt"]
    parquet.write_table(pyarrow.table(columns), folder / "clinvar/train.parquet")
    corpus = read_corpus(seal(folder), windows=None)
    with pytest.raises(DataError, match="has no column alt"):
        read_tables(corpus.tables("clinical"), "clinical", split="train", policy=None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"pos": "5"}, "is not an edit"),
        ({"pos": True}, "is not an edit"),
        ({"alt": "A"}, "reference and alternate are equal"),
        ({"ref": "R"}, "reference is not a text of A, C, G and T"),
        ({"clinical_significance": None}, "clinical_significance is 'None'"),
    ],
)
def test_an_invalid_row_of_edits_is_reported_with_file_and_line(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    folder = write_corpus(tmp_path)
    base = {"chrom": "chr1", "pos": 5, "ref": "A", "alt": "C", "clinical_significance": "B"}
    write_lines(folder / "clinvar/train.jsonl", [base, {**base, **row}])
    corpus = read_corpus(seal(folder), windows=None)
    with pytest.raises(DataError) as caught:
        read_tables(corpus.tables("clinical"), "clinical", split="train", policy=None)
    assert f"clinvar/train.jsonl:2: {said}" in str(caught.value)


@pytest.mark.acceptance("input-G-38")
def test_plain_relative_names_are_safe() -> None:
    assert why_unsafe("placed/part-0.jsonl") == ""
    assert json.loads('"c:/x"') == "c:/x" and why_unsafe("c:/x") == "is not relative"

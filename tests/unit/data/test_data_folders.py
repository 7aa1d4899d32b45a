"""Sources of several files, plain text and compressed files: the same documents, places and refusals."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation import chunk, sources
from evergrad_trainer.data.preparation.content import Content
from evergrad_trainer.data.preparation.sources import FileSpan, Scan, Stat
from evergrad_trainer.data.prepare import check_prepared, check_unchanged
from evergrad_trainer.data.prepared import Prepared, PreparedSource, TokenSequence
from evergrad_trainer.data.token_source import TokenSource

Write = Callable[[Path, Sequence[str]], Path]
Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]

pytestmark = pytest.mark.usefixtures("small_chunks")

PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def texts_of(sequence: TokenSequence | None) -> list[str]:
    """The documents of a sequence of byte tokens."""
    assert sequence is not None
    parts = [
        np.fromfile(shard.path, "<u2", shard.tokens, offset=2 * shard.start)
        for shard in sequence.shards
    ]
    tokens = np.concatenate(parts)
    ends = np.flatnonzero(tokens == 256)
    documents = np.split(tokens, ends + 1)
    assert documents.pop().size == 0
    return [bytes(one[:-1].astype(np.uint8)).decode() for one in documents]


def tree_of(source: PreparedSource) -> dict[str, bytes]:
    folder = source.train.shards[0].path.parent
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def message_of(prepare: Prepare, recipe: Training) -> str:
    with pytest.raises(DataError) as caught:
        prepare(recipe)
    assert caught.value.exit_code == 64
    return str(caught.value)


def one_source(training: Recipe, path: str, **keys: object) -> Training:
    return training(
        data={"sources": [{"name": "docs", "path": path, **keys}], "heldOut": None}
    )


@pytest.fixture
def shards(tmp_path: Path, documents: Write, topics: list[str]) -> Path:
    """A folder of five files with ten documents each."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(5):
        documents(folder / f"{number}.jsonl", topics[10 * number : 10 * number + 10])
    return folder


@pytest.mark.capability("C-6")
@pytest.mark.parametrize("path", ["shards", "shards/*.jsonl", "**/*.jsonl"])
def test_the_files_of_a_folder_or_pattern_are_one_source_in_name_order(
    training: Recipe, topics: list[str], prepared_in: Prepare, shards: Path, path: str
) -> None:
    (source,) = prepared_in(one_source(training, path)).sources
    assert texts_of(source.train) == topics
    assert [Path(file.name).name for file in source.files] == [
        f"{n}.jsonl" for n in range(5)
    ]
    assert [file.lines for file in source.files] == [10] * 5


def test_the_record_of_a_folder_is_json_and_of_one_file_is_unchanged(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, shards: Path
) -> None:
    prepared = prepared_in(one_source(training, "shards"))
    assert Prepared.from_json(json.loads(json.dumps(prepared.to_json()))) == prepared
    (alone,) = prepared_in(one_source(training, "shards/0.jsonl")).to_json()["sources"]
    assert not {"files", "unit"} & alone.keys()


@pytest.mark.parametrize("ending", PACKED)
def test_compressed_files_give_the_same_bytes_and_the_same_data_as_plain_files(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    ending: str,
) -> None:
    path = documents(tmp_path / "docs.jsonl", topics)
    held_out = {"heldOut": {"fraction": 0.2}}
    recipe = training(data={**held_out, "preparedDirectory": "plain"})
    before = prepared_in(recipe)
    (plain,) = before.sources
    packed = tmp_path / f"docs.jsonl{ending}"
    packed.write_bytes(PACKED[ending](path.read_bytes()))
    data = {
        "sources": [{"name": "docs", "path": packed.name}],
        **held_out,
    }
    (source,) = prepared_in(training(data=data)).sources
    assert tree_of(source) == tree_of(plain)
    assert (source.fingerprint, source.content_hash) == (
        plain.fingerprint,
        plain.content_hash,
    )
    assert len(source.train.shards) > 3
    # A run that began with the plain file continues with the compressed file.
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    check_unchanged(before, training(data=data), **where)


@pytest.mark.parametrize("ending", PACKED)
def test_a_compressed_file_is_read_by_few_jobs_and_resumes_after_an_interruption(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    prepared_in: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    texts = [f"{number} " * 200 for number in range(60)]
    path = documents(tmp_path / "docs.jsonl", texts)
    (tmp_path / f"d{ending}").write_bytes(PACKED[ending](path.read_bytes()))
    real, jobs = chunk.execute, []

    def interrupted(job: chunk.TokenizeJob, tokenizer: object) -> object:
        jobs.append(len(job.chunks))
        for outcome in real(job, tokenizer):  # type: ignore[arg-type]
            yield outcome
            if len(jobs) == 3 and fails:
                raise KeyboardInterrupt

    monkeypatch.setattr("evergrad_trainer.data.preparation.pool.execute", interrupted)
    fails = True
    with pytest.raises(KeyboardInterrupt):
        prepared_in(one_source(training, f"d{ending}"))
    begun = list(jobs)
    jobs.clear()
    fails = False
    (source,) = prepared_in(one_source(training, f"d{ending}")).sources
    assert texts_of(source.train) == texts
    assert len(begun) + len(jobs) <= 9
    done = begun[0] + begun[1] + 1
    assert sum(jobs) == len(source.train.shards) - done


def test_a_truncated_compressed_file_is_reported(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    path = documents(tmp_path / "docs.jsonl", topics)
    data = gzip.compress(path.read_bytes())[:-100]
    (tmp_path / "d.gz").write_bytes(data)
    assert message_of(prepared_in, one_source(training, "d.gz")).startswith(
        f"{tmp_path / 'd.gz'}: ends within its gzip archive, after byte {len(data)}; "
    )


def test_a_tar_archive_is_detected_inside_its_compression(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    header = b"a.jsonl".ljust(257, b"\0") + b"ustar\x0000"
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(header.ljust(1024, b"\0")))
    message = message_of(prepared_in, one_source(training, "d.tar.gz"))
    assert message.startswith(f"{tmp_path / 'd.tar.gz'}: is a tar archive; ")
    assert message.endswith("Unpack it.")


@pytest.mark.capability("O-78")
def test_plain_text_files_are_one_document_each_or_one_document_per_line(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n")
    (folder / "b.txt").write_bytes(b"")
    (folder / "below" / "c.txt.gz").write_bytes(gzip.compress("drei ä\n".encode()))
    (whole,) = prepared_in(one_source(training, "texts", type="text")).sources
    assert texts_of(whole.train) == ["one\r\n\ntwo\n", "drei ä\n"]
    assert (whole.documents, whole.skipped, whole.unit) == (2, {"emptyText": 1}, "file")
    (lines,) = prepared_in(
        one_source(training, "texts", type="text", document="line")
    ).sources
    assert texts_of(lines.train) == ["one", "two", "drei ä"]
    assert (lines.documents, lines.skipped, lines.unit) == (3, {"blankLine": 1}, "line")
    assert whole.fingerprint != lines.fingerprint


def test_a_text_file_that_is_not_utf8_is_reported_and_can_be_skipped(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"fine")
    (folder / "b.txt").write_bytes(b"caf\xe9 au lait")
    recipe = one_source(training, "texts", type="text")
    assert message_of(prepared_in, recipe) == (
        f"{folder / 'b.txt'}: the file is not UTF-8; byte 3 of its text starts no character. "
        "Correct the file, or set spec.training.data.malformed to skip."
    )
    kept = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"malformed": "skip"})}
    )
    (source,) = prepared_in(kept).sources
    assert (texts_of(source.train), source.malformed) == (["fine"], 1)


def test_a_text_that_starts_like_an_archive_is_text(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    (tmp_path / "a.txt").write_text("BZh was here\nPAR1 too \\ud800\n")
    (source,) = prepared_in(
        one_source(training, "a.txt", type="text", document="line")
    ).sources
    assert texts_of(source.train) == ["BZh was here", "PAR1 too \\ud800"]


def test_a_malformed_line_is_reported_with_its_own_file_and_line(
    training: Recipe, prepared_in: Prepare, shards: Path
) -> None:
    path = shards / "3.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = "bad"
    path.write_text("\n".join(lines) + "\n")
    assert message_of(prepared_in, one_source(training, "shards")).startswith(
        f"{path}:5: the line is not JSON; Expecting value at column 1."
    )


def test_a_folder_without_a_document_is_refused(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("" if name == "a.jsonl" else "\n")
    message = message_of(prepared_in, one_source(training, "*.jsonl"))
    assert message.startswith(
        f"{tmp_path / '*.jsonl'}: contains no document in 1 lines; 1 are blank"
    )


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            lambda folder: (folder / "7.jsonl").write_text('{"text": "x"}\n'),
            "added: 7.jsonl",
        ),
        (lambda folder: (folder / "2.jsonl").unlink(), "missing: 2.jsonl"),
        (
            lambda folder: (folder / "2.jsonl").write_text('{"text": "x"}\n'),
            "changed: 2.jsonl",
        ),
        (
            lambda folder: (folder / "0.jsonl").rename(folder / "9.jsonl"),
            "added: 9.jsonl; missing: 0.jsonl",
        ),
    ],
)
def test_a_resumed_run_refuses_a_changed_folder_and_names_the_differing_files(
    tmp_path: Path,
    training: Recipe,
    prepared_in: Prepare,
    shards: Path,
    change: Callable[[Path], None],
    difference: str,
) -> None:
    recipe = one_source(training, "shards")
    recorded = Prepared.from_json(json.loads(json.dumps(prepared_in(recipe).to_json())))
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    check_unchanged(recorded, recipe, **where)
    change(shards)
    with pytest.raises(DataError) as caught:
        check_unchanged(recorded, recipe, **where)
    assert str(caught.value) == (
        f"{shards}: its files are not those that this run was prepared from; {difference}. "
        "Restore them to continue this run, or train the new content under another run name."
    )


def test_a_file_added_after_the_comparison_is_detected_in_the_prepared_data(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, shards: Path
) -> None:
    recipe = one_source(training, "shards")
    recorded = Prepared.from_json(json.loads(json.dumps(prepared_in(recipe).to_json())))
    check_prepared(recorded, prepared_in(recipe))
    (shards / "7.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError) as caught:
        check_prepared(recorded, prepared_in(recipe))
    assert str(caught.value) == (
        f"{shards}: its files are not those that this run was prepared from; added: 7.jsonl. "
        "Restore them to continue this run, or train the new content under another run name."
    )


def test_renamed_files_in_the_same_order_are_the_same_data(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, shards: Path
) -> None:
    recipe = one_source(training, "shards")
    recorded = prepared_in(recipe)
    for number in range(5):
        (shards / f"{number}.jsonl").rename(shards / f"part-{number}.jsonl")
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    check_unchanged(recorded, recipe, **where)
    again = prepared_in(recipe)
    assert again.sources[0].reused
    assert again.sources[0].fingerprint == recorded.sources[0].fingerprint


def test_a_folder_of_one_file_is_the_same_data_as_the_file(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    (tmp_path / "only").mkdir()
    documents(tmp_path / "only" / "a.jsonl", topics)
    (folder,) = prepared_in(one_source(training, "only")).sources
    (file,) = prepared_in(one_source(training, "only/a.jsonl")).sources
    assert (file.fingerprint, file.reused) == (folder.fingerprint, True)
    assert (len(folder.files), len(file.files)) == (1, 0)


@pytest.mark.capability("O-78")
def test_token_files_are_one_sequence_and_its_end_is_held_out(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    ids = np.arange(100, dtype="<u2")
    for number, part in enumerate(np.split(ids, [10, 60, 95])):
        part.tofile(tmp_path / f"{number}.bin")
    source = [{"name": "flat", "type": "tokens", "path": "*.bin"}]
    data = {"sources": source, "heldOut": {"fraction": 0.1}}
    (found,) = prepared_in(training(data=data)).sources
    for sequence, wanted in ((found.train, ids[:90]), (found.held_out, ids[90:])):
        assert sequence is not None
        parts = [
            np.fromfile(shard.path, "<u2", shard.tokens, offset=2 * shard.start)
            for shard in sequence.shards
        ]
        assert np.concatenate(parts).tolist() == wanted.tolist()
    np.array([1, 2, 999], dtype="<u2").tofile(tmp_path / "2.bin")
    message = message_of(prepared_in, training(data=data))
    assert message.startswith(f"{tmp_path / '2.bin'}: token 2 is 999;")


def test_a_sample_is_described_with_its_file_and_its_line_in_the_file(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    (tmp_path / "d").mkdir()
    for number in range(30):
        (tmp_path / "d" / f"{number:02}.txt").write_text(f"text {number}\n\nand more\n")
    described = {}
    for document in ("line", "file"):
        recipe = one_source(training, "d", type="text", document=document)
        (source,) = prepared_in(recipe).sources
        # Small files share chunks: a folder of thousands must not become thousands of token files.
        assert len(source.train.shards) == 1
        items = TokenSource(source, source.train, sequence_length=16, end_of_document=256)
        described[document] = [items.describe(number) for number in range(2)]
    assert described["line"] == [
        "00.txt, line 1, to 01.txt, line 1",
        "01.txt, line 1, to 02.txt, line 1",
    ]
    assert described["file"] == ["00.txt", "00.txt to 01.txt"]


SCAN_CACHE = "evergrad_trainer.data.preparation.scan_cache"


def note_scans(monkeypatch: pytest.MonkeyPatch, *, failing: int = 0) -> list[str]:
    """Record the names of the files that are scanned from now on. ``failing``: number of the unreadable
    file."""
    read: list[str] = []
    real = sources.scan_file

    def noted(source: object, path: Path, **rest: object) -> Scan:
        read.append(path.name)
        if len(read) == failing:
            raise OSError(5, "Input/output error")
        return real(source, path, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(f"{SCAN_CACHE}.scan_file", noted)
    return read


def test_a_second_scan_of_a_folder_reads_only_changed_files(
    tmp_path: Path,
    training: Recipe,
    prepared_in: Prepare,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{SCAN_CACHE}.is_settled", lambda _: True)
    prepared_in(one_source(training, "shards"))
    read = note_scans(monkeypatch)
    os.utime(shards / "3.jsonl")
    prepared_in(one_source(training, "shards"))
    assert read == ["3.jsonl"]
    assert len(list((tmp_path / "prepared" / ".scans").iterdir())) == 1


def test_a_scan_that_ends_with_an_error_forgets_no_file_that_it_did_not_reach(
    training: Recipe,
    prepared_in: Prepare,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{SCAN_CACHE}.is_settled", lambda _: True)
    prepared_in(one_source(training, "shards"))
    read = note_scans(monkeypatch, failing=2)
    os.utime(shards / "0.jsonl")
    os.utime(shards / "1.jsonl")
    with pytest.raises(Exception, match="Input/output error"):
        prepared_in(one_source(training, "shards"))
    prepared_in(one_source(training, "shards"))
    assert read == ["0.jsonl", "1.jsonl", "1.jsonl"]


def test_a_file_that_was_recently_written_when_read_is_read_again(
    training: Recipe,
    prepared_in: Prepare,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = note_scans(monkeypatch)
    # All are old enough once the last one is read.
    monkeypatch.setattr(f"{SCAN_CACHE}.is_settled", lambda _: len(read) >= 5)
    prepared_in(one_source(training, "shards"))
    prepared_in(one_source(training, "shards"))
    assert len(read) == 10


def test_chunks_of_many_files_have_similar_sizes_and_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stat = Stat(0, 0, 0)

    def file(number: int, *sizes: int) -> tuple[Path, Scan]:
        spans = tuple(FileSpan(0, size, 1, size) for size in sizes)
        return Path(str(number)), Scan(stat, "x", sum(sizes), lines=len(sizes), spans=spans)

    files = tuple(file(number, *[300] * (number % 7)) for number in range(500))
    content = Content(files)
    assert all(chunk.size >= 1024 for chunk in content.chunks[:-1])
    assert sum(chunk.size for chunk in content.chunks) == content.size
    pieces = [piece for chunk in content.chunks for piece in chunk.pieces]
    assert [content.place(piece.first_line)[0] for piece in pieces] == [
        p.path for p in pieces
    ]
    monkeypatch.setattr(sources, "MOST_CHUNKS", 20)
    assert len(Content(files).chunks) <= 20

"""prepare in one process: its published files, their reuse, and every message about invalid input."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation import chunk, sources
from evergrad_trainer.data.preparation.disk_errors import disk_problem
from evergrad_trainer.data.preparation.files import SCANS
from evergrad_trainer.data.prepare import PrepareProgress, check_published, check_unchanged
from evergrad_trainer.data.prepared import Prepared, TokenSequence

Write = Callable[[Path, Sequence[str]], Path]
Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]

pytestmark = pytest.mark.usefixtures("small_chunks")


def tokens_of(sequence: TokenSequence | None) -> list[int]:
    """All tokens of a sequence, read plainly."""
    if sequence is None:
        return []
    dtype = np.dtype(sequence.dtype)
    parts = (
        np.fromfile(s.path, dtype=dtype, count=s.tokens, offset=s.start * dtype.itemsize)
        for s in sequence.shards
    )
    return [int(token) for part in parts for token in part]


def texts_of(sequence: TokenSequence | None) -> list[str]:
    """The documents of a sequence of byte tokens."""
    texts: list[bytearray] = [bytearray()]
    for token in tokens_of(sequence):
        if token == 256:
            texts.append(bytearray())
        else:
            texts[-1].append(token)
    assert texts.pop() == b""
    return [text.decode() for text in texts]


def tree_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def message_of(prepare: Prepare, recipe: Training) -> str:
    with pytest.raises(DataError) as caught:
        prepare(recipe)
    return str(caught.value)


def test_documents_become_tokens_in_order_each_with_its_end_token(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    (source,) = prepared_in(training()).sources
    assert texts_of(source.train) == topics
    assert (source.documents, source.skipped, source.repaired, source.reused) == (
        len(topics),
        {},
        0,
        False,
    )
    assert len(source.train.shards) > 3
    for shard in source.train.shards:
        assert shard.documents is not None
        starts = np.fromfile(shard.documents, dtype="<i8").reshape(-1, 2)
        ends = np.flatnonzero(np.fromfile(shard.path, dtype="<u2") == 256) + 1
        assert starts[:, 0].tolist() == [0, *ends[:-1].tolist()]
    lines = np.concatenate(
        [
            np.fromfile(shard.documents, dtype="<i8").reshape(-1, 2)[:, 1]
            for shard in source.train.shards
            if shard.documents
        ]
    )
    assert lines.tolist() == list(range(1, len(topics) + 1))


@pytest.mark.capability("T-X14")
def test_a_second_preparation_reuses_everything(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    first = prepared_in(training())
    monkeypatch.setattr(chunk, "execute", lambda *_: pytest.fail("tokenised again"))
    again = prepared_in(training())
    assert again.sources[0].reused
    assert again.sources[0].train == first.sources[0].train
    assert Prepared.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_the_prepared_directory_contains_only_published_files(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    (source,) = prepared_in(training(data={"heldOut": {"fraction": "10%"}})).sources
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [source.fingerprint]
    names = {
        path.name.split("-")[0]
        for path in (tmp_path / "prepared" / source.fingerprint).iterdir()
    }
    assert names == {"index.json", "train", "heldOut"}


@pytest.mark.capability("A-42")
def test_unprepared_data_is_refused_if_preparation_is_not_permitted(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    with pytest.raises(DataError) as refused:
        check_published(training(), **where)
    (problem,) = refused.value.problems
    said = f"{tmp_path / 'docs.jsonl'}: is not prepared; this start may prepare nothing"
    assert said in str(problem)
    assert "Run `evergrad prepare` with this file first" in str(problem)
    # No preparation is started; the scan of the files may be kept.
    assert {path.name for path in (tmp_path / "prepared").iterdir()} <= {SCANS}

    prepared_in(training())
    check_published(training(), **where)
    # Other contents are other data.
    documents(tmp_path / "docs.jsonl", [*topics, "more"])
    with pytest.raises(DataError, match="is not prepared"):
        check_published(training(), **where)


def test_the_manifest_can_set_the_prepared_directory(
    tmp_path: Path, training: Recipe, documents: Write, prepared_in: Prepare
) -> None:
    documents(tmp_path / "docs.jsonl", ["a"])
    (source,) = prepared_in(training(data={"preparedDirectory": "elsewhere"})).sources
    assert (tmp_path / "elsewhere" / source.fingerprint / "index.json").is_file()
    assert not (tmp_path / "prepared").exists()


def test_settings_that_do_not_change_the_bytes_do_not_change_the_fingerprint(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    shutil.copy(tmp_path / "docs.jsonl", tmp_path / "copy.jsonl")
    same = [
        training(),
        training(data={"sequenceLength": 32}),
        training(batching={"globalBatchSize": 4, "microBatchSize": 4}),
        training(reproducibility={"seed": 5}),
        training(data={"sources": [{"name": "other", "path": "copy.jsonl", "weight": 3}]}),
    ]
    assert len({prepared_in(recipe).sources[0].fingerprint for recipe in same}) == 1


@pytest.mark.acceptance("input-4e-16")
@pytest.mark.capability("A-76")
def test_settings_that_change_the_bytes_change_the_fingerprint(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    documents(tmp_path / "more.jsonl", [*topics, "more"])
    body = (tmp_path / "docs.jsonl").read_text().replace('{"text"', '{"body": "b", "text"')
    (tmp_path / "body.jsonl").write_text(body)
    different = [
        training(),
        training(data={"sources": [{"name": "docs", "path": "more.jsonl"}]}),
        training(data={"sources": [{"name": "docs", "path": "body.jsonl"}]}),
        training(
            data={"sources": [{"name": "docs", "path": "body.jsonl", "textField": "body"}]}
        ),
        training(data={"malformed": "skip"}),
        training(data={"heldOut": {"fraction": 0.1}}),
        training(data={"heldOut": {"fraction": 0.2}}),
        training(data={"heldOut": {"count": 5}}),
        training(data={"heldOut": {"count": 5}}, reproducibility={"seed": 5}),
    ]
    assert len({prepared_in(recipe).sources[0].fingerprint for recipe in different}) == len(
        different
    )


@pytest.mark.capability("T-X14")
@pytest.mark.parametrize(
    ("held_out", "count"),
    [
        ({"fraction": 0.1}, 5),
        ({"fraction": 0.001}, 1),
        ({"count": 7}, 7),
        ({"count": 49}, 49),
    ],
)
def test_held_out_documents_are_chosen_by_the_seed_and_never_trained_on(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    held_out: dict[str, float],
    count: int,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    (source,) = prepared_in(training(data={"heldOut": held_out})).sources
    kept, chosen = texts_of(source.train), texts_of(source.held_out)
    assert (len(chosen), source.held_out_documents, source.documents) == (count, count, 50)
    assert sorted([*kept, *chosen]) == sorted(topics)
    assert kept == [text for text in topics if text in kept]
    assert chosen == [text for text in topics if text in chosen]
    other = prepared_in(
        training(data={"heldOut": held_out}, reproducibility={"seed": 1})
    ).sources[0]
    assert texts_of(other.held_out) != chosen


def test_the_held_out_split_counts_documents_and_not_lines(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    lines = [
        "",
        "bad",
        '{"text": ""}',
        *(json.dumps({"text": f"text {number}"}) for number in range(10)),
    ]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines * 3))
    (source,) = prepared_in(
        training(data={"malformed": "skip", "heldOut": {"fraction": 0.5}})
    ).sources
    assert (source.documents, source.held_out_documents) == (30, 15)
    assert source.skipped == {"notJson": 3, "blankLine": 3, "emptyText": 3}
    assert source.malformed == 3


@pytest.mark.acceptance("input-A-42")
@pytest.mark.parametrize(
    ("held_out", "wanted"), [({"count": 3}, 3), ({"fraction": 0.9}, 3), ({"count": 10}, 10)]
)
def test_a_split_that_leaves_no_training_data_is_refused(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    prepared_in: Prepare,
    held_out: dict[str, float],
    wanted: int,
) -> None:
    path = documents(tmp_path / "docs.jsonl", ["a", "b", "c"])
    assert message_of(prepared_in, training(data={"heldOut": held_out})) == (
        f"{path}: holds 3 documents and {wanted} would be held out; none would remain for training. "
        "Lower spec.training.data.heldOut, or give more documents."
    )


def test_a_document_longer_than_a_chunk_is_one_document(
    tmp_path: Path, training: Recipe, documents: Write, prepared_in: Prepare
) -> None:
    texts = ["short", "x" * 5000, "after", "y" * 3000]
    documents(tmp_path / "docs.jsonl", texts)
    assert texts_of(prepared_in(training()).sources[0].train) == texts


@pytest.mark.acceptance("input-2e-14")
def test_malformed_lines_are_refused_with_the_first_five_and_their_number(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    good = json.dumps({"text": "x" * 100})
    (tmp_path / "docs.jsonl").write_text(
        "\n".join(f"{good}\nbad {number}" for number in range(100)) + "\n"
    )
    problems = message_of(prepared_in, training()).split("\n")
    path = tmp_path / "docs.jsonl"
    policy = "spec.training.data.malformed"
    assert problems[:2] == [
        (
            f"{path}:{line}: the line is not JSON; Expecting value at column 1. Correct the line, or "
            f"set {policy} to skip."
        )
        for line in (2, 4)
    ]
    assert [problem.partition(": ")[0] for problem in problems] == [
        *(f"{path}:{line}" for line in (2, 4, 6, 8, 10)),
        str(path),
    ]
    assert problems[5].startswith(
        f"{path}: 100 of 200 lines are malformed; the first 5 are named above."
    )
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_single_malformed_line_is_one_message(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    (tmp_path / "docs.jsonl").write_bytes(
        b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n'
    )
    assert message_of(prepared_in, training()) == (
        f"{tmp_path / 'docs.jsonl'}:2: the line is not UTF-8; a byte in it starts no character. "
        "Correct the line, or set spec.training.data.malformed to skip."
    )


def test_a_truncated_last_line_is_reported_as_a_possibly_truncated_file(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    path = documents(tmp_path / "docs.jsonl", topics)
    path.write_bytes(path.read_bytes()[:-20])
    message = message_of(prepared_in, training())
    assert message.startswith(
        f"{path}:50: the line is not JSON; Unterminated string starting at column 10; "
    )
    assert (
        "the file ends within this line, so it may be truncated. Copy the file again"
        in message
    )


@pytest.mark.acceptance("8d-12d:pretrain", "input-2e-14")
def test_skipped_malformed_lines_are_counted_and_the_other_lines_are_kept(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    lines = [
        b'{"text": "a"}',
        b"bad",
        b"[]",
        b'{"x": 1}',
        b"\xff",
        b"",
        b'{"text": ""}',
        b'{"text": "\\ud800"}',
    ]
    (tmp_path / "docs.jsonl").write_bytes(b"\n".join(lines))
    (source,) = prepared_in(training(data={"malformed": "skip"})).sources
    assert texts_of(source.train) == ["a", "\ufffd"]
    assert source.skipped == {
        "notJson": 1,
        "notAnObject": 1,
        "noText": 1,
        "notUtf8": 1,
        "blankLine": 1,
        "emptyText": 1,
    }
    assert (source.malformed, source.repaired) == (4, 1)


@pytest.mark.acceptance("input-G-52")
@pytest.mark.capability("G-52")
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\n\n", "2 are blank or have an empty text, 0 are malformed"),
        (b"\xef\xbb\xbf", "0 are blank or have an empty text, 0 are malformed"),
        (
            b'{"body": "a"}\n' * 3,
            (
                "0 are blank or have an empty text, 3 are malformed, the first in line 1: the object "
                "has no field 'text'"
            ),
        ),
    ],
)
def test_a_file_without_a_document_is_refused(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, content: bytes, why: str
) -> None:
    (tmp_path / "docs.jsonl").write_bytes(content)
    message = message_of(prepared_in, training(data={"malformed": "skip"}))
    assert message.startswith(f"{tmp_path / 'docs.jsonl'}: contains no document in ")
    assert why in message


@pytest.mark.acceptance("input-O-34")
def test_all_missing_files_are_reported_together(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    (tmp_path / "empty.jsonl").touch()
    sources = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "empty.jsonl"}]
    recipe = training(
        data={"sources": sources},
        evaluation={"sources": [{"name": "c", "path": "c.jsonl"}]},
    )
    message = message_of(prepared_in, recipe)
    assert [line.partition(";")[0] for line in message.split("\n")] == [
        f"{tmp_path / 'a.jsonl'}: does not exist",
        f"{tmp_path / 'empty.jsonl'}: is empty",
        f"{tmp_path / 'c.jsonl'}: does not exist",
    ]
    assert "spec.training.evaluation.sources[0].path names it" in message


@pytest.mark.capability("C-8")
def test_evaluation_sources_are_prepared_completely(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    documents(tmp_path / "eval.jsonl", ["one", "two"])
    recipe = training(
        data={"heldOut": {"count": 2}},
        evaluation={"sources": [{"name": "eval", "path": "eval.jsonl"}]},
    )
    prepared = prepared_in(recipe)
    assert texts_of(prepared.evaluation[0].train) == ["one", "two"]
    assert prepared.evaluation[0].held_out is None


def test_a_tokens_file_is_read_in_place_and_its_end_is_held_out(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    ids = np.arange(1000) % 257
    ids.astype("<u4").tofile(tmp_path / "ids.bin")
    sources = [{"name": "flat", "type": "tokens", "path": "ids.bin", "dtype": "uint32"}]
    (whole,) = prepared_in(training(data={"sources": sources})).sources
    assert (tokens_of(whole.train), whole.held_out, whole.documents) == (
        ids.tolist(),
        None,
        None,
    )
    (split,) = prepared_in(
        training(data={"sources": sources, "heldOut": {"fraction": "10%"}})
    ).sources
    assert (tokens_of(split.train), tokens_of(split.held_out)) == (
        ids[:900].tolist(),
        ids[900:].tolist(),
    )
    assert split.train.shards[0].path == tmp_path / "ids.bin"
    assert whole.fingerprint != split.fingerprint


def test_problems_of_a_tokens_file_are_reported(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    np.array([1, 2, 300, 4], dtype="<u2").tofile(tmp_path / "ids.bin")
    sources = [{"name": "flat", "type": "tokens", "path": "ids.bin"}]
    assert "token 2 is 300; the tokenizer has the ids 0 to 256" in message_of(
        prepared_in, training(data={"sources": sources})
    )
    np.array([1, 2, 3], dtype="<u2").tofile(tmp_path / "ids.bin")
    message = message_of(
        prepared_in, training(data={"sources": sources, "heldOut": {"fraction": 0.1}})
    )
    assert (
        "holds 3 tokens and 2 would be held out; none would remain for training" in message
    )


def test_a_number_of_documents_cannot_be_held_out_of_a_tokens_file(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    np.array([1, 2, 3, 4], dtype="<u2").tofile(tmp_path / "ids.bin")
    data = {
        "sources": [{"name": "flat", "type": "tokens", "path": "ids.bin"}],
        "heldOut": {"count": 1},
    }
    assert message_of(prepared_in, training(data=data)).startswith(
        "spec.training.data.heldOut.count: cannot be kept; source 'flat'"
    )


def test_damaged_prepared_data_is_reported_with_its_remedy(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    (source,) = prepared_in(training()).sources
    directory, shard = (
        tmp_path / "prepared" / source.fingerprint,
        source.train.shards[1].path,
    )
    remedy = (
        f"Delete the directory {directory} and prepare again; the source file is untouched."
    )
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert message_of(prepared_in, training()) == (
        f"{shard}: has {len(whole) - 2} bytes and should have {len(whole)}; the prepared data is "
        f"damaged. {remedy}"
    )
    shard.unlink()
    assert message_of(prepared_in, training()).startswith(
        f"{shard}: cannot be read (No such file or directory)"
    )
    index = directory / "index.json"
    for content in ("{", "[]", '{"format": 99}', '{"format": 1}'):
        index.write_text(content)
        assert message_of(prepared_in, training()).startswith(f"{index}: is not an index")
    index.unlink()
    assert (
        message_of(prepared_in, training())
        == f"{index}: is missing; the prepared data is damaged. {remedy}"
    )
    shutil.rmtree(directory)
    assert prepared_in(training()).sources[0].train == source.train


def test_a_changed_source_is_refused_by_a_resumed_run_and_prepared_again_by_a_new_one(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    path = documents(tmp_path / "docs.jsonl", topics)
    recorded = prepared_in(training())
    before = recorded.sources[0]
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    check_unchanged(recorded, training(), **where)
    os.utime(path, (1, 1))
    check_unchanged(recorded, training(), **where)
    path.write_text(path.read_text().replace("Evergrad trains", "Evergrad waits!"))
    with pytest.raises(DataError) as caught:
        check_unchanged(recorded, training(), **where)
    after = prepared_in(training()).sources[0]
    assert str(caught.value) == (
        f"{path}: its content changed since this run was prepared; "
        f"the fingerprint was {before.content_hash} and is {after.content_hash}. "
        "Restore the file to continue this run, or train the new content under another run name."
    )
    assert after.fingerprint != before.fingerprint
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        check_unchanged(recorded, training(), **where)


def test_a_source_that_changes_during_preparation_is_refused(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    path = documents(tmp_path / "docs.jsonl", topics)

    def append(progress: PrepareProgress) -> None:
        if progress.phase == "tokenize" and progress.bytes_done == progress.bytes_total:
            with path.open("a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(DataError, match="changed while it was being prepared"):
        prepared_in(training(), on_progress=append)
    assert not list((tmp_path / "prepared").glob("[0-9a-f]*"))


def test_progress_counts_the_bytes_of_every_source_in_every_phase(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    documents(tmp_path / "b.jsonl", topics[:20])
    seen: list[PrepareProgress] = []
    sources = [{"name": "docs", "path": "docs.jsonl"}, {"name": "b", "path": "b.jsonl"}]
    prepared = prepared_in(training(data={"sources": sources}), on_progress=seen.append)
    total = sum((tmp_path / name).stat().st_size for name in ("docs.jsonl", "b.jsonl"))
    for phase in ("scan", "tokenize"):
        counts = [progress.bytes_done for progress in seen if progress.phase == phase]
        assert counts == sorted(counts)
        assert counts[-1] == total
    assert {progress.source for progress in seen} == {"docs", "b"}
    assert (seen[-1].documents, seen[-1].tokens) == (
        70,
        sum(source.train.tokens for source in prepared.sources),
    )


def test_an_interrupted_preparation_resumes_with_its_finished_chunks(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    recipe = training(data={"heldOut": {"fraction": 0.2}})
    expected = tree_of(tmp_path / "prepared" / prepared_in(recipe).sources[0].fingerprint)
    shutil.rmtree(tmp_path / "prepared")
    done: list[object] = []
    real = chunk.execute

    def interrupted(job: chunk.Job, tokenizer: object) -> chunk.ChunkResult:
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(job)
        return real(job, tokenizer)  # type: ignore[arg-type]

    monkeypatch.setattr("evergrad_trainer.data.preparation.pool.execute", interrupted)
    total = 0
    for limit in (2, 3, 4, 100):
        done.clear()
        if limit < 100:
            with pytest.raises(KeyboardInterrupt):
                prepared_in(recipe)
        else:
            source = prepared_in(recipe).sources[0]
        total += len(done)
    assert tree_of(tmp_path / "prepared" / source.fingerprint) == expected
    chunks = len(
        {name for name in expected if name.endswith(".tokens") and name.startswith("train")}
    )
    assert total == 2 * chunks  # each chunk tokenised once and split once


def leave_attempt(
    folder: Path,
    training: Recipe,
    prepared_in: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Prepare until the rename that publishes the source, which fails. Returns the folder that is left."""
    real = os.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "data":
            raise OSError(errno.EIO, "Input/output error", str(self))
        real(self, target)
        return Path(target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        assert "Input/output error" in message_of(prepared_in, training())
    (attempt,) = (folder / "prepared").glob(".tmp-*")
    return attempt


def test_a_finished_chunk_whose_file_was_truncated_is_prepared_again(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    attempt = leave_attempt(tmp_path, training, prepared_in, monkeypatch)
    damaged = sorted((attempt / "data").glob("*.tokens"))[1]
    damaged.write_bytes(b"")
    (attempt / "chunks" / "tokenize-00002.json").write_text('{"torn')
    assert texts_of(prepared_in(training()).sources[0].train) == topics


def test_chunks_of_a_version_with_other_boundaries_are_not_reused(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    attempt = leave_attempt(tmp_path, training, prepared_in, monkeypatch)
    finished = len(list((attempt / "chunks").glob("tokenize-*.json")))
    assert finished > 1
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", 2 * sources.SMALLEST_CHUNK)
    assert texts_of(prepared_in(training()).sources[0].train) == topics
    assert not list((tmp_path / "prepared").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("number", "what", "remedy"),
    [
        (
            errno.ENOSPC,
            "could not be written; No space left on device",
            "Free space on the file system of ",
        ),
        (
            errno.EDQUOT,
            "could not be written; Disk quota exceeded",
            "Free space on the file system of ",
        ),
        (
            errno.EROFS,
            "may not be written; Read-only file system",
            "Change its permissions, or set data.preparedDirectory",
        ),
        (
            errno.EIO,
            "could not be read or written; Input/output error",
            "Check the path and the file system",
        ),
    ],
)
def test_a_disk_error_is_explained_with_a_remedy(
    number: int, what: str, remedy: str
) -> None:
    problem = str(
        disk_problem(
            OSError(number, os.strerror(number), "/data/prepared/x.tokens"),
            Path("/data/prepared"),
        )
    )
    assert problem.startswith(f"/data/prepared/x.tokens: {what}. {remedy}")


def test_a_prepared_directory_that_is_a_file_is_reported(
    tmp_path: Path, training: Recipe, documents: Write, prepared_in: Prepare
) -> None:
    documents(tmp_path / "docs.jsonl", ["a"])
    (tmp_path / "prepared").write_text("in the way")
    assert message_of(prepared_in, training()).startswith(
        f"{tmp_path / 'prepared'}: could not be read or written; File exists"
    )


def test_a_tokenizer_that_drops_a_whole_text_gives_no_empty_document(
    tmp_path: Path, documents: Write, training: Recipe, prepared_in: Prepare
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token=None))
    backend.normalizer = normalizers.Replace("z", "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    documents(tmp_path / "docs.jsonl", ["a b", "zzz", "b"])
    (source,) = prepared_in(
        training(tokenizer={"type": "transformers", "path": "words"})
    ).sources
    assert tokens_of(source.train) == [0, 1, 2, 1, 2]
    assert (source.documents, source.skipped) == (2, {"emptyText": 1})

"""The files that a source's path names: folders, patterns, their order, and errors."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.data.preparation import files
from evergrad_trainer.data.preparation.files import (
    SourceEntry,
    find_files,
    relative_name,
    training_sources,
)

FIELD = "spec.training.data.sources[0]"


def entry(path: Path, kind: str = "jsonl") -> SourceEntry:
    return SourceEntry(FIELD, "docs", path, kind, "text", "uint16")  # type: ignore[arg-type]


def names(path: Path, kind: str = "jsonl") -> list[str]:
    source = entry(path, kind)
    found, problems = find_files(source)
    assert problems == []
    return [relative_name(file, source) for file in found]


def message(path: Path, kind: str = "jsonl") -> str:
    _, (problem,) = find_files(entry(path, kind))
    return str(problem)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "a-b/c.jsonl.zst",
        "a/d.ndjson",
        "a/e.txt",
        "a/f.parquet",
        "a/_temporary/g.jsonl",
        "a/.hidden.jsonl",
        "_SUCCESS",
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "data"


@pytest.mark.capability("C-6")
def test_a_folder_contains_the_files_of_its_type_recursively_in_folder_order(
    folder: Path,
) -> None:
    assert names(folder) == ["a/d.ndjson", "a-b/c.jsonl.zst", "a.jsonl.gz", "b.jsonl"]
    assert names(folder, "text") == ["a/e.txt"]
    assert names(folder, "parquet") == ["a/f.parquet"]


@pytest.mark.capability("C-6")
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jsonl*", ["a.jsonl.gz", "b.jsonl"]),
        ("*/*", ["a/d.ndjson", "a/e.txt", "a/f.parquet", "a-b/c.jsonl.zst"]),
        ("[a-b].jsonl", ["b.jsonl"]),
        ("?/**/*.jsonl", []),
        ("**/*.jsonl", ["b.jsonl"]),
        ("**/_*/*.jsonl", ["a/_temporary/g.jsonl"]),
        ("a/**", ["d.ndjson", "e.txt", "f.parquet"]),
        ("*/e.txt", ["a/e.txt"]),
    ],
)
def test_a_pattern_contains_the_files_that_match_it(
    folder: Path, pattern: str, found: list[str]
) -> None:
    if found:
        assert names(folder / pattern) == found
    else:
        assert message(folder / pattern) == (
            f"{folder / pattern}: matches no file; {FIELD}.path names it. "
            "Check the pattern; it is relative to the manifest's directory."
        )


def test_a_file_whose_name_looks_like_a_pattern_is_used_literally(tmp_path: Path) -> None:
    path = tmp_path / "part[1].jsonl"
    path.write_text("{}")
    (tmp_path / "part1.jsonl").write_text("{}")
    assert find_files(entry(path)) == ((path,), [])
    assert not entry(path).is_expanded((path,))


def test_links_to_folders_are_followed_and_loops_end(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "z.jsonl").write_text("x")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "a" / "loop").symlink_to(folder)
    assert names(folder)[-1] == "linked/z.jsonl"


def test_files_are_ordered_by_name_and_not_by_the_disk(
    tmp_path: Path,
) -> None:
    wanted = [f"{number:02}.jsonl" for number in range(40)]
    for name in reversed(wanted):
        (tmp_path / name).write_text("x")
    assert names(tmp_path) == wanted


def test_problems_of_a_folder_or_pattern_are_reported(folder: Path) -> None:
    assert message(folder / "none" / "*.jsonl") == (
        f"{folder / 'none'}: does not exist; {FIELD}.path names it. "
        "Check the path; it is relative to the manifest's directory."
    )
    assert message(folder, "tokens") == (
        f"{folder}: contains no file whose name ends in .bin or .tokens; {FIELD}.path names it. "
        f"Check the folder, or name its files by a pattern, such as {folder}/*."
    )
    (folder / "a" / "f.parquet").write_text("")
    assert message(folder, "parquet").startswith(f"{folder / 'a/f.parquet'}: is empty")


def test_each_unusable_file_of_a_folder_is_reported(folder: Path) -> None:
    os.mkfifo(folder / "p.jsonl")
    (folder / "q.jsonl").symlink_to("nowhere")
    _, problems = find_files(entry(folder))
    assert [str(one).partition(";")[0] for one in problems] == [
        f"{folder / 'p.jsonl'}: is not a regular file",
        f"{folder / 'q.jsonl'}: does not exist",
    ]


def test_empty_files_among_others_are_accepted(folder: Path) -> None:
    (folder / "b.jsonl").write_text("")
    assert names(folder)[-1] == "b.jsonl"


def test_more_files_than_can_be_recorded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    assert message(folder) == (
        f"{folder}: names more than 3 files; their names are kept in run.json ({FIELD}.path names it). "
        "Join them to fewer, for example to JSON Lines, or cut the source into several."
    )


def test_a_file_that_is_too_large_for_one_document_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_DOCUMENT", 0)
    assert message(folder, "text") == (
        f"{folder / 'a/e.txt'}: has 1 bytes, and a document may have at most 0; each file is one document, which must fit into memory. Set {FIELD}.document to line, or cut the file."
    )


def test_compressed_token_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.bin.gz").write_bytes(b"1234")
    assert message(tmp_path / "ids.bin.gz", "tokens") == (
        f"{tmp_path / 'ids.bin.gz'}: is compressed; token ids are read in place, at any position. "
        "Decompress it."
    )


def test_a_file_that_a_pattern_finds_more_than_once_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evergrad_trainer.data.preparation.files.MOST_FILES", 12)
    wanted = [f"{top}/a/a/{number}.jsonl" for top in "pq" for number in range(6)]
    for name in wanted:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    pattern = tmp_path / "**" / "a" / "**" / "*.jsonl"
    assert names(pattern) == wanted
    (tmp_path / "q" / "a" / "y.jsonl").write_text("x\n")
    assert "names more than 12 files" in message(pattern)


def write_run(directory: Path) -> None:
    for name in ("checkpoints", "logs"):
        (directory / name).mkdir(parents=True)
    for name in (
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "logs/worker.jsonl",
        "own.jsonl",
    ):
        (directory / name).write_text("{}\n")


@pytest.mark.parametrize("path", ["", "**/*.jsonl", "*/*.jsonl", "*/*/*.jsonl"])
def test_files_written_by_runs_are_excluded_from_a_folder_or_pattern(
    tmp_path: Path, path: str
) -> None:
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "other")
    for name in ("data/a.jsonl", "runs/notes/b.jsonl", "data/run.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    found, problems = find_files(entry(tmp_path / path))
    wanted = {
        "*/*.jsonl": ["data/a.jsonl"],
        "*/*/*.jsonl": ["runs/notes/b.jsonl"],
    }.get(path, ["data/a.jsonl", "runs/notes/b.jsonl"])
    assert [one.relative_to(tmp_path).as_posix() for one in found] == wanted
    assert problems == []


@pytest.mark.parametrize("path", ["", "**/*.jsonl", "*.jsonl"])
def test_a_run_directory_named_by_a_path_gives_its_data_without_its_records(
    tmp_path: Path, path: str
) -> None:
    write_run(tmp_path)
    assert names(tmp_path / path) == ["own.jsonl"]
    record = tmp_path / "metrics.jsonl"
    assert find_files(entry(record)) == ((record,), [])


def test_prepared_data_is_excluded_from_a_folder_or_pattern(tmp_path: Path) -> None:
    for name in ("own.tokens", "mine/x/train-0.tokens", "other/x/train-0.tokens"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\1\0\2\0")
    (tmp_path / "other" / ".scans").mkdir()
    for path in (tmp_path, tmp_path / "**" / "*.tokens"):
        source = entry(path, "tokens")
        found, problems = find_files(source, prepared_directory=tmp_path / "mine")
        assert (found, problems) == ((tmp_path / "own.tokens",), [])
    # A folder of prepared data that is named itself is read.
    source = entry(tmp_path / "mine", "tokens")
    found, _ = find_files(source, prepared_directory=tmp_path / "mine")
    assert [one.name for one in found] == ["train-0.tokens"]


def test_a_bracket_in_the_folder_of_the_manifest_is_not_a_pattern(
    tmp_path: Path, training: Callable[..., Training]
) -> None:
    base = tmp_path / "run[1]"
    (base / "data").mkdir(parents=True)
    (base / "data" / "a.jsonl").write_text("{}\n")
    sources = [
        {"name": "pattern", "path": "data/*.jsonl"},
        {"name": "missing", "path": "data/b.jsonl"},
    ]
    pattern, missing = training_sources(training(data={"sources": sources}), base)
    assert find_files(pattern) == ((base / "data" / "a.jsonl",), [])
    assert relative_name(base / "data" / "a.jsonl", pattern) == "a.jsonl"
    _, (problem,) = find_files(missing)
    assert problem.what == "does not exist"

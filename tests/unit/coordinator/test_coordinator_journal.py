"""The generation file: durable, compared before it is set, held by one process."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from evergrad_coordinator.edge.journal import FileStore, JournalError, MemoryStore


def test_a_new_file_starts_at_zero_and_keeps_its_number(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "runs" / "state")
    assert store.load() == 0
    assert store.advance(0, 5)
    store.close()
    again = FileStore(tmp_path / "runs" / "state")
    assert again.load() == 5
    again.close()


def test_a_number_other_than_the_expected_one_is_not_replaced(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state")
    assert store.advance(0, 5)
    assert not store.advance(4, 6)
    assert store.load() == 5
    store.close()


def test_a_retry_after_a_failed_folder_sync_finds_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "state")
    sync, synced = os.fsync, []

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            synced.append(descriptor)
            if len(synced) == 1:
                raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(OSError, match="Input/output"):
        store.advance(0, 5)
    assert store.advance(0, 5)
    assert len(synced) == 2, "the retry is durable too"
    assert not store.advance(0, 5), "only what was left undone is taken for granted"
    assert store.advance(5, 6)
    store.close()


def test_a_number_of_another_process_is_not_accepted_as_our_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state")
    (tmp_path / "state").write_text('{"generation": 5}')
    assert not store.advance(0, 5)
    store.close()


def test_the_memory_store_compares_the_expected_number_too() -> None:
    store = MemoryStore(3)
    assert not store.advance(2, 9)
    assert store.advance(3, 9)
    assert store.load() == 9


def test_a_second_holder_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state")
    with pytest.raises(
        JournalError, match=r"held by process \d+ on .*\. .*Wait until that process ends"
    ):
        FileStore(tmp_path / "state")
    store.close()
    FileStore(tmp_path / "state").close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from evergrad_coordinator.edge.journal import FileStore"
    code += "; FileStore(Path(sys.argv[1])); os._exit(9)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "state")], check=False
        ).returncode
        == 9
    )
    FileStore(tmp_path / "state").close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "7",
        '{"generation": "7"}',
        '{"generation": -1}',
        '{"generation": true}',
        '{"generation": 129, "again": 130}',
        "ü",
    ],
)
def test_a_damaged_file_is_reported_with_its_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").write_text(text, encoding="utf-8")
    store = FileStore(tmp_path / "state")
    with pytest.raises(JournalError, match=r"state: .*(Delete it|delete the file)"):
        store.load()
    store.close()


def test_a_folder_path_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        FileStore(tmp_path / "file" / "state")


def test_the_journal_file_is_json(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state")
    store.advance(0, 12)
    store.close()
    assert json.loads((tmp_path / "state").read_text()) == {"generation": 12, "again": 12}


def test_numbers_after_the_first_are_written_in_place_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = FileStore(tmp_path / "state"), tmp_path / "state"
    assert store.advance(0, 999)
    before, synced = path.stat(), []
    sync = os.fdatasync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", note)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("the name and the length stay"))
    assert store.advance(999, 1000)
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert synced == [before.st_ino]
    store.close()
    again = FileStore(path)
    assert again.load() == 1000
    again.close()


def test_a_number_whose_sync_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "state")
    assert store.advance(0, 5)
    sync, write = os.fdatasync, os.pwrite
    written: list[int] = []

    def fail_once(descriptor: int) -> None:
        if len(written) == 1:
            raise OSError(5, "Input/output error")
        sync(descriptor)

    def note(descriptor: int, data: bytes, offset: int) -> int:
        written.append(json.loads(data)["generation"])
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    monkeypatch.setattr(os, "pwrite", note)
    with pytest.raises(OSError, match="Input/output"):
        store.advance(5, 6)
    # After an error the system may regard the data as written: only another write brings it to the disk.
    assert store.advance(5, 6) and written == [6, 6]
    assert not store.advance(5, 6)
    store.close()


def test_a_file_of_an_older_release_is_continued(tmp_path: Path) -> None:
    (tmp_path / "state").write_text('{"generation": 5}\n')
    store = FileStore(tmp_path / "state")
    assert store.load() == 5
    assert store.advance(5, 6) and store.advance(6, 7) and store.load() == 7
    store.close()


def test_a_file_that_was_replaced_is_opened_again_before_the_next_write(
    tmp_path: Path,
) -> None:
    store, path = FileStore(tmp_path / "state"), tmp_path / "state"
    assert store.advance(0, 5)
    other = tmp_path / "other"
    other.write_text('{"generation": 5}')
    other.replace(path)
    assert store.advance(5, 6) and json.loads(path.read_text())["generation"] == 6
    store.close()

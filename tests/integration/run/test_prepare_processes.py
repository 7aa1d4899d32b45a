"""prepare with helper processes: killed, resumed, run twice at the same time, and on a full disk; always the
same published bytes."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from patience import PATIENCE

from bed.process_state import children_of, is_alive

PREPARE = """
import json, sys, time
from pathlib import Path
from evergrad_manifest.training import Training
from evergrad_trainer.data import prepare as entry
from evergrad_trainer.base import lock
from evergrad_trainer.data.preparation import pool, sources
from evergrad_trainer.base.errors import EvergradError

options = json.loads(sys.argv[1])
sources.SMALLEST_CHUNK = options["chunk"]
entry.SMALLEST_CHUNK = options["inline_below"]
if not options["has_locks"]:
    def flock(*_):
        raise OSError(37, "No locks available")
    lock.fcntl.flock = flock
folder = Path(options["folder"])
if options["hold"]:
    kind, count = options["hold"]
    original = pool.ProcessPool.run
    def run(self, jobs):
        kinds = []
        def noted():
            for job in jobs:
                kinds.append(job.to_json()["kind"])
                yield job
        for number, outcome in enumerate(original(self, noted()), 1):
            while (kinds[0], number) == (kind, count) and not (folder / "go-on").exists():
                time.sleep(0.01)
            yield outcome
    pool.ProcessPool.run = run
recipe = Training.model_validate(options["training"])
phases = []
def show(progress):
    if not phases or phases[-1] != progress.phase:
        phases.append(progress.phase)
        print(progress.phase, flush=True)
try:
    prepared = entry.prepare(
        recipe, base_directory=folder, prepared_directory=Path(options["prepared"]), workers=options["workers"], on_progress=show
    )
except EvergradError as error:
    print(json.dumps({"error": str(error), "class": type(error).__name__}), flush=True)
    sys.exit(int(error.exit_code))
facts = {
    "prepared": prepared.to_json(),
    "torch": "torch" in sys.modules,
}
print(json.dumps(facts), flush=True)
"""


def write_documents(path: Path, count: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(
                json.dumps(
                    {"text": f"{number} äöü 漢字 " * (number % 40 + 1), "id": number},
                    ensure_ascii=number % 2 == 0,
                )
                + "\n"
            )
    return path


class Preparers:
    """Starts ``prepare`` in separate processes, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(
        self, *, prefix: tuple[str, ...] = (), **options: Any
    ) -> subprocess.Popen[str]:
        """``hold``: a kind of job and a number; after that many jobs, it pauses until the file go-on
        exists."""
        data = {
            "sources": [{"name": "docs", "path": "docs.jsonl"}],
            "sequenceLength": 16,
            "heldOut": {"fraction": 0.1},
        }
        training = {
            "model": {"config": {"model_type": "llama"}},
            "data": {**data, **options.pop("data", {})},
            "batching": {"globalBatchSize": 8, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
        }
        defaults = {
            "chunk": 65536,
            "inline_below": 0,
            "workers": 2,
            "has_locks": True,
            "hold": None,
            "prepared": str(self.folder / "prepared"),
        }
        options = {**defaults, "folder": str(self.folder), "training": training, **options}
        command = [*prefix, sys.executable, "-c", PREPARE, json.dumps(options)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Its last line, once it has ended well."""
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        facts: dict[str, Any] = json.loads(output.splitlines()[-1])
        return facts

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def published(self) -> dict[str, bytes]:
        (directory,) = (self.folder / "prepared").glob("[0-9a-f]*")
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def preparers(tmp_path: Path) -> Iterator[Preparers]:
    write_documents(tmp_path / "docs.jsonl", 4000)
    started = Preparers(tmp_path)
    yield started
    started.end()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """The bytes that one process publishes, without helpers."""
    serial = Preparers(tmp_path_factory.mktemp("serial"))
    write_documents(serial.folder / "docs.jsonl", 4000)
    facts = serial.finish(serial.start(inline_below=2**40))
    assert not facts["torch"]
    yield serial.published()
    serial.end()


def wait_for(condition: Callable[[], Any], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within a long while"
        time.sleep(0.005)


def records(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "prepared").glob(f".tmp-*/chunks/{kind}-*.json"))


@pytest.mark.acceptance("8d-1e")
def test_helpers_write_the_same_bytes_as_one_process(
    preparers: Preparers, expected: dict[str, bytes]
) -> None:
    preparers.finish(preparers.start(workers=3))
    assert preparers.published() == expected
    assert len(expected) > 20


@pytest.mark.capability("T-X14")
@pytest.mark.parametrize("kind", ["tokenize", "split"])
def test_a_killed_preparation_resumes_with_its_finished_chunks_and_publishes_the_same_data(
    preparers: Preparers, expected: dict[str, bytes], kind: str
) -> None:
    folder = preparers.folder
    process = preparers.start(hold=[kind, 3])
    wait_for(lambda: len(records(folder, kind)) >= 3, what=f"{kind} record")
    helpers = children_of(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_alive, helpers)), what="end of the helpers")
    (attempt,) = (folder / "prepared").glob(".tmp-*")
    done = {
        record.name: record.stat().st_ino for record in (attempt / "chunks").glob("*.json")
    }
    assert done
    assert not list((folder / "prepared").glob("[0-9a-f]*")), (
        "killed too late: it was published already"
    )
    stopped = preparers.start(hold=["split", 1])
    wait_for(
        lambda: len(records(folder, "split")) >= (1 if kind == "tokenize" else 4),
        what="further record",
    )
    stopped.kill()
    stopped.communicate()
    still = {
        record.name: record.stat().st_ino for record in (attempt / "chunks").glob("*.json")
    }
    assert {name: still[name] for name in done} == done, "a finished chunk was made again"
    preparers.finish(preparers.start())
    assert preparers.published() == expected
    assert not list((folder / "prepared").glob(".tmp-*")) + list(
        (folder / "prepared").glob(".lock-*")
    )


def write_format(folder: Path, kind: str) -> dict[str, str]:
    """The documents of the fixture in another form: a source's keys for it."""
    lines = (folder / "docs.jsonl").read_bytes().splitlines(keepends=True)
    texts = [json.loads(line)["text"] for line in lines]
    if kind == "text":
        for number, text in enumerate(texts):
            path = folder / "texts" / f"{number % 9}" / f"{number:05}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {"type": "text", "path": "texts"}
    if kind == "line":
        (folder / "lines.txt").write_text("".join(text + "\n" for text in texts))
        return {"type": "text", "document": "line", "path": "lines.txt"}
    if kind == "parquet":
        table = pyarrow.table({"text": texts})
        for number in range(2):
            part = table.slice(2000 * number, 2000)
            pyarrow.parquet.write_table(
                part, folder / f"{number}.parquet", row_group_size=97
            )
        return {"type": "parquet", "path": "*.parquet"}
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    for number in range(3):
        part = b"".join(lines[1500 * number : 1500 * (number + 1)])
        (folder / f"{number}.packed").write_bytes(pack(part))
    return {"path": "?.packed"}


@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "parquet",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("line", "gzip", "zstandard")
        ),
    ],
)
def test_each_format_gives_the_same_bytes_with_one_process_and_with_helpers_after_a_kill(
    preparers: Preparers, kind: str
) -> None:
    folder = preparers.folder
    data = {"sources": [{"name": "docs", **write_format(folder, kind)}]}
    alone = {"inline_below": 2**40, "prepared": str(folder / "alone")}
    facts = preparers.finish(preparers.start(data=data, **alone))
    assert facts["prepared"]["sources"][0]["documents"] == 4000

    process = preparers.start(data=data, hold=["tokenize", 2])
    wait_for(lambda: len(records(folder, "tokenize")) >= 2, what="tokenize record")
    helpers = children_of(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_alive, helpers)), what="end of the helpers")
    assert not list((folder / "prepared").glob("[0-9a-f]*")), "killed too late"
    preparers.finish(preparers.start(data=data, workers=3))
    (directory,) = (folder / "alone").glob("[0-9a-f]*")
    published = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    assert preparers.published() == published
    assert len(published) > 20


@pytest.mark.long
def test_memory_does_not_grow_with_a_row_group(preparers: Preparers) -> None:
    peaks = []
    # 85 MB of text are between them; the smaller one also fills all buffers of the reader.
    for repeat in (12, 36):
        texts = [f"{number} words of a document " * 40 for number in range(4000 * repeat)]
        table = pyarrow.table({"text": texts})
        path = preparers.folder / f"{repeat}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=10**9, use_dictionary=False)
        source = {"name": "docs", "type": "parquet", "path": path.name}
        process = preparers.start(
            data={"sources": [source]},
            workers=1,
            chunk=2**40,
            prepared=str(preparers.folder / f"p{repeat}"),
        )
        helper = 0.0
        while process.poll() is None:
            helper = max([helper, *map(peak_megabytes, children_of(process.pid))])
            time.sleep(0.005)
        preparers.finish(process)
        peaks.append(helper)
    assert peaks[0] > 10
    assert peaks[1] - peaks[0] < 40


@pytest.mark.capability("A-76")
def test_one_of_two_preparers_works_and_the_other_uses_the_published_data(
    preparers: Preparers, expected: dict[str, bytes]
) -> None:
    folder = preparers.folder
    first = preparers.start(hold=["tokenize", 1])
    wait_for(lambda: records(folder, "tokenize"), what="finished chunk")
    first.send_signal(signal.SIGSTOP)
    second = preparers.start()
    assert second.stdout is not None
    seen = [second.stdout.readline().strip()]
    while seen[-1] != "wait":
        seen.append(second.stdout.readline().strip())
        assert seen[-1], seen
    first.send_signal(signal.SIGCONT)
    (folder / "go-on").touch()
    assert preparers.finish(first)["prepared"] == preparers.finish(second)["prepared"]
    assert preparers.published() == expected


def test_without_locks_two_concurrent_preparers_publish_the_same_data(
    preparers: Preparers, expected: dict[str, bytes]
) -> None:
    both = [preparers.start(has_locks=False) for _ in range(2)]
    assert len({json.dumps(preparers.finish(process)["prepared"]) for process in both}) == 1
    published = preparers.published()
    assert {name: published[name] for name in expected} == expected


def test_a_helper_that_is_killed_ends_the_preparation_with_a_reason(
    preparers: Preparers,
) -> None:
    process = preparers.start(workers=1, hold=["tokenize", 1])
    wait_for(lambda: records(preparers.folder, "tokenize"), what="finished chunk")
    (helper,) = children_of(process.pid)
    os.kill(helper, signal.SIGKILL)
    (preparers.folder / "go-on").touch()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 70
    assert "was killed (signal 9), probably for memory. Use fewer with --workers" in output


def test_data_errors_in_helpers_are_user_errors(preparers: Preparers) -> None:
    with (preparers.folder / "docs.jsonl").open("a") as file:
        file.write('bad\n{"text": "torn')
    process = preparers.start()
    output, _ = process.communicate(timeout=PATIENCE)
    error = json.loads(output.splitlines()[-1])
    assert (process.returncode, error["class"]) == (64, "DataError")
    path = preparers.folder / "docs.jsonl"
    assert error["error"].startswith(f"{path}:4001: the line is not JSON")
    assert (
        f"{path}:4002: the line is not JSON; Unterminated string starting at column 10; the file ends within"
        in error["error"]
    )


def test_malformed_lines_of_every_chunk_are_counted_by_helpers(
    preparers: Preparers,
) -> None:
    path = preparers.folder / "docs.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(
        b"\n".join(line if number % 50 else b"bad" for number, line in enumerate(lines))
    )
    process = preparers.start()
    output, _ = process.communicate(timeout=PATIENCE)
    problems = json.loads(output.splitlines()[-1])["error"].splitlines()
    assert [problem.partition(": ")[0] for problem in problems[:5]] == [
        f"{path}:{line}" for line in (1, 51, 101, 151, 201)
    ]
    assert problems[5].startswith(f"{path}: 81 of 4001 lines are malformed")


def small_file_system(folder: Path, size: str) -> tuple[str, ...]:
    """A command prefix that runs what follows with a file system of ``size`` at ``folder``."""
    script = 'mount -t tmpfs -o size=$0 tmpfs "$1" && shift && exec "$@"'
    prefix = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        size,
        str(folder),
    )
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine does not let a test mount a file system")
    return prefix


@pytest.mark.parametrize("inline_below", [0, 2**40])
def test_a_full_disk_is_an_error_that_names_what_to_free(
    preparers: Preparers, inline_below: int
) -> None:
    small = preparers.folder / "small"
    small.mkdir()
    process = preparers.start(
        prefix=small_file_system(small, "600k"),
        prepared=str(small / "prepared"),
        inline_below=inline_below,
    )
    output, _ = process.communicate(timeout=PATIENCE)
    error = json.loads(output.splitlines()[-1])
    assert (process.returncode, error["class"]) == (64, "DataError")
    assert error["error"].startswith(f"{small / 'prepared'}")
    assert "could not be written; No space left on device" in error["error"]
    assert f"Free space on the file system of {small / 'prepared'}" in error["error"]
    assert "Traceback" not in output


def peak_megabytes(pid: int) -> float:
    """The largest resident size so far; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return max(
        (
            int(line.split()[1]) / 1024
            for line in status.splitlines()
            if line.startswith("VmHWM")
        ),
        default=0.0,
    )


@pytest.mark.capability("C-31")
def test_memory_does_not_grow_with_the_file(preparers: Preparers) -> None:
    peaks = []
    for repeat in (1, 12):
        text = json.dumps({"text": "some words of a document " * 40}) + "\n"
        (preparers.folder / "docs.jsonl").write_text(text * (4000 * repeat))
        process = preparers.start(
            workers=1, chunk=2**40, prepared=str(preparers.folder / f"p{repeat}")
        )
        own = helper = 0.0
        while process.poll() is None:
            own = max(own, peak_megabytes(process.pid))
            helper = max([helper, *map(peak_megabytes, children_of(process.pid))])
            time.sleep(0.005)
        preparers.finish(process)
        peaks.append((own, helper))
    (small_own, small_helper), (large_own, large_helper) = peaks
    assert min(small_own, small_helper) > 10
    assert large_own - small_own < 24
    assert large_helper - small_helper < 24


READ = """
import re, sys
from pathlib import Path
import numpy as np
from evergrad_trainer.data.prepared import Shard, TokenSequence
from evergrad_trainer.data.token_files import TokenReader
shards = tuple(Shard(Path(name), 0, Path(name).stat().st_size // 2) for name in sys.argv[1:])
reader = TokenReader(TokenSequence("uint16", shards), sequence_length=256, end_of_document=256)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
order = np.random.default_rng(0).permutation(reader.num_windows)
reader.read(order[:64].tolist())
before = peak()
for first in range(0, len(order), 64):
    reader.read(order[first : first + 64].tolist())
print(peak() - before)
"""


@pytest.mark.capability("C-31")
def test_reading_prepared_data_does_not_increase_memory(tmp_path: Path) -> None:
    names = []
    for number in range(4):
        names.append(str(tmp_path / f"{number}.tokens"))
        with open(names[-1], "wb") as file:
            np.full(16 * 2**20, number, dtype="<u2").tofile(file)
    grown = subprocess.run(
        [sys.executable, "-c", READ, *names],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert float(grown.stdout) < 16


def test_a_helper_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, evergrad_trainer.data.preparation.worker; "
    code += "print([n for n in ('torch', 'transformers') if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert result.stdout.strip() == "[]"

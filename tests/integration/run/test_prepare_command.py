"""``evergrad prepare`` as people use it: summary, JSON, bar on a terminal, lines elsewhere, exit codes."""

import argparse
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

from bed.process_state import children_of, is_alive
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.commands import prepare as command
from evergrad_trainer.data.prepare import PrepareProgress

MANIFEST = """
apiVersion: evergrad.dev/v1alpha1
kind: TrainingRun
metadata: {name: docs-lm}
spec:
  training:
    model: {config: {model_type: llama}}
    data: {sources: [{name: docs, path: docs.jsonl}], sequenceLength: 64, malformed: skip, heldOut: {fraction: 10%}}
    batching: {globalBatchSize: 8, microBatchSize: 4}
    optimizer: {learningRate: 1e-3}
    horizon: {steps: 10}
    evaluation: {sources: [{name: other, path: other.jsonl}]}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(40)]
    (tmp_path / "docs.jsonl").write_text(
        "\n".join([*lines, "", "bad", "[]", '{"text": "\\ud800"}']) + "\n"
    )
    (tmp_path / "other.jsonl").write_text('{"text": "something else"}\n')
    (tmp_path / "run.yaml").write_text(MANIFEST)
    return tmp_path / "run.yaml"


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.execute(parser.parse_args(list(map(str, arguments))))


@pytest.mark.capability("A-77")
def test_the_summary_names_every_source_and_the_skipped_lines(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = manifest.parent / "prepared"
    assert run(manifest, "--prepared-directory", directory) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert re.fullmatch(
        r"docs   41 documents, \d+ tokens, \d+ tokens held out in 4 documents, "
        r"lines skipped: 1 blank, 1 not an object, 1 not JSON, half surrogate pairs replaced "
        r"in 1 document",
        lines[0],
    )
    assert lines[1] == "other  1 document, 15 tokens"
    assert re.fullmatch(rf"prepared in \S+, in {re.escape(str(directory))}", lines[2])
    warning = (
        f"warning: {manifest.parent / 'docs.jsonl'}: 2 malformed lines were skipped (1 not an "
        "object, 1 not JSON)\n"
    )
    assert printed.err == warning
    assert run(manifest, "--prepared-directory", directory) == 0
    printed = capsys.readouterr()
    assert [line.endswith(" (prepared before)") for line in printed.out.splitlines()] == [
        True,
        True,
        False,
    ]
    assert printed.err == warning


def test_json_output_is_one_document_for_scripts(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = manifest.parent / "prepared"
    assert run(manifest, "--prepared-directory", directory, "--json", "--workers", "1") == 0
    summary = json.loads(capsys.readouterr().out)
    (docs,), (other,) = summary["sources"], summary["evaluation"]
    assert (summary["preparedDirectory"], summary["tokenizer"], summary["vocabSize"]) == (
        str(directory),
        "byte-1",
        257,
    )
    assert (
        docs["name"],
        docs["documents"],
        docs["heldOutDocuments"],
        docs["repaired"],
    ) == (
        "docs",
        41,
        4,
        1,
    )
    assert docs["skipped"] == {"blankLine": 1, "notAnObject": 1, "notJson": 1}
    assert (other["tokens"], other["heldOutTokens"], other["reused"]) == (15, 0, False)
    assert (directory / docs["fingerprint"] / "index.json").is_file()


def test_invalid_input_is_a_user_error(manifest: Path) -> None:
    (manifest.parent / "other.jsonl").unlink()
    with pytest.raises(DataError, match="does not exist") as caught:
        run(manifest, "--prepared-directory", manifest.parent / "prepared")
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("workers", ["0", "-3"])
def test_an_invalid_number_of_workers_is_refused(
    manifest: Path, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(manifest, "--workers", workers)
    assert f"{workers} is not a positive number" in capsys.readouterr().err


def test_without_a_terminal_a_line_is_printed_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, now = io.StringIO(), [0.0]
    lines = command._Lines(stream, clock=lambda: now[0])
    for second in range(13):
        now[0] = float(second)
        lines.show(
            PrepareProgress(
                "tokenize",
                "docs",
                second * 2**20,
                16 * 2**20,
                documents=second,
                tokens=second * 10**6,
            )
        )
    lines.show(PrepareProgress("wait", "docs", 0, 0))
    now[0] = 20.0
    lines.show(PrepareProgress("wait", "docs", 0, 0))
    assert stream.getvalue().splitlines() == [
        "tokenising docs: 31% of 16 MiB, 5M tokens",
        "tokenising docs: 62% of 16 MiB, 10M tokens",
        "another process prepares docs: 100% of 0 B",
    ]


SCRIPT = """
import argparse, sys
from evergrad_trainer.commands import prepare as command
from evergrad_trainer.data import prepare as entry
from evergrad_trainer.data.preparation import sources
sources.SMALLEST_CHUNK = 4096
entry.SMALLEST_CHUNK = 0
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.execute(parser.parse_args()))
"""


def test_on_a_terminal_a_bar_shows_bytes_and_is_removed_at_the_end(manifest: Path) -> None:
    (manifest.parent / "docs.jsonl").write_text(
        json.dumps({"text": "words " * 100}) * 1
        + "\n"
        + '{"text": "more words"}\n' * 20_000
    )
    main, terminal = os.openpty()
    arguments = [
        sys.executable,
        "-c",
        SCRIPT,
        str(manifest),
        "--prepared-directory",
        str(manifest.parent / "prepared"),
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        arguments, stderr=terminal, stdout=subprocess.PIPE, text=True, env=environment
    )
    os.close(terminal)
    shown = b""
    while select.select([main], [], [], 200)[0]:
        try:
            shown += os.read(main, 65536)
        except OSError:
            break
    output, _ = process.communicate(timeout=PATIENCE)
    os.close(main)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "tokenising docs" in text
    assert re.search(r"/\d+\.\d KiB", text)
    assert (
        shown.decode().endswith(("\x1b[2K", "\x1b[?25h", "\r"))
        or "\x1b[2K" in shown.decode()[-40:]
    )
    assert output.startswith("docs   20,001 documents")


HELD = """
import signal, time
# A shell starts what runs in its background with this signal ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from evergrad_trainer.data.preparation import pool

original = pool.ProcessPool.run

def run(self, jobs):
    for outcome in original(self, jobs):
        while True:  # until it is interrupted
            time.sleep(0.01)

pool.ProcessPool.run = run
"""


def test_ctrl_c_keeps_finished_chunks_and_leaves_no_process(manifest: Path) -> None:
    (manifest.parent / "docs.jsonl").write_text(
        json.dumps({"text": "words and more " * 50}) + "\n"
    )
    with (manifest.parent / "docs.jsonl").open("a") as file:
        file.write((json.dumps({"text": "words and more " * 50}) + "\n") * 3_000)
    arguments = [
        sys.executable,
        "-c",
        HELD + SCRIPT,
        str(manifest),
        "--prepared-directory",
        str(manifest.parent / "prepared"),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not list((manifest.parent / "prepared").glob(".tmp-*/chunks/*.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    helpers = children_of(process.pid)
    assert len(helpers) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert (
        errors.splitlines()[-1]
        == "interrupted; finished chunks are kept, and the next prepare continues from there"
    )
    assert "Traceback" not in errors
    assert not any(map(is_alive, helpers))
    resumed = [sys.executable, "-c", SCRIPT, *arguments[3:]]
    assert subprocess.run(resumed, check=False, timeout=PATIENCE).returncode == 0

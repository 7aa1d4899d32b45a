"""``evergrad prepare`` as the first process of a pod: last messages, retries for host errors, and a status
page."""

import errno
import http.client
import json
import socket
import time
from pathlib import Path

import pytest
from patience import PATIENCE

from evergrad_cli.main import main
from evergrad_common.contract import ErrorKind, decode_termination
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.commands import pod, prepare
from evergrad_trainer.commands.pod import StatusPage
from evergrad_trainer.data.prepare import PrepareProgress

MANIFEST = """
apiVersion: evergrad.dev/v1alpha1
kind: TrainingRun
metadata: {name: docs-lm}
spec:
  training:
    model: {config: {model_type: llama}}
    data: {sources: [{name: docs, path: docs.jsonl}], sequenceLength: 64}
    batching: {globalBatchSize: 8, microBatchSize: 4}
    optimizer: {learningRate: 1e-3}
    horizon: {steps: 10}
"""


def prepare_in_pod(folder: Path, lines: str) -> tuple[int, tuple[ErrorKind | None, str]]:
    """Run the command as the operator starts it; return its exit code and its termination message."""
    (folder / "config").mkdir()
    (folder / "config/run.yaml").write_text(MANIFEST)
    (folder / "volume").mkdir()
    (folder / "volume/docs.jsonl").write_text(lines)
    (folder / "token").write_text("secret")
    log = folder / "termination"
    log.write_text("")
    code = main(
        [
            "prepare",
            str(folder / "config/run.yaml"),
            *("--base-directory", str(folder / "volume")),
            *("--prepared-directory", str(folder / ".prepared")),
            *("--termination-log", str(log)),
            *("--status-port", "0", "--token-file", str(folder / "token")),
        ]
    )
    return code, decode_termination(log.read_text())


def ask(port: int | None, path: str, token: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_relative_paths_start_at_the_folder_of_the_pods_and_data_is_next_to_the_run(
    tmp_path: Path,
) -> None:
    code, words = prepare_in_pod(tmp_path, '{"text": "a document"}\n')
    assert (code, words) == (0, (None, ""))
    assert list((tmp_path / ".prepared").glob("*/*")), "nothing was prepared"


def test_a_mistake_in_the_data_is_written_to_the_termination_log(tmp_path: Path) -> None:
    code, (kind, text) = prepare_in_pod(tmp_path, '{"text": "a document"}\n{broken\n')
    assert (code, kind) == (64, ErrorKind.INPUT)
    assert "docs.jsonl:2: " in text


def test_an_error_of_the_volume_is_retried_and_then_a_host_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pod, "HOST_PAUSES", (0.0, 0.0))

    def fail(*_: object) -> int:
        raise DataError(Problem("/volume", "could not be read")) from OSError(
            errno.ESTALE, "stale file handle"
        )

    monkeypatch.setattr(prepare, "_execute", fail)
    code, (kind, text) = prepare_in_pod(tmp_path, "")
    assert (code, kind) == (70, ErrorKind.ENVIRONMENT)
    assert "/volume: could not be read" in text
    assert capsys.readouterr().err.count("Tried again in 0 s.") == 2


def test_the_page_shows_progress_only_with_the_token() -> None:
    page = StatusPage("secret", port=0)
    try:
        page.show(
            prepare.describe_progress(PrepareProgress("tokenize", "docs", 5, 10, 1, 2))
        )
        status, text = ask(page.port, "/status", "secret")
        assert status == 200
        assert json.loads(text) == {
            "phase": "Preparing",
            "preparation": {
                "work": "tokenize",
                "source": "docs",
                "bytesDone": 5,
                "bytesTotal": 10,
                "documents": 1,
                "tokens": 2,
            },
        }
        assert ask(page.port, "/status", "another")[0] == 401
        assert ask(page.port, "/elsewhere", "another")[0] == 401
        assert ask(page.port, "/elsewhere", "secret")[0] == 404
    finally:
        page.close()


def test_a_port_in_use_disables_the_page_and_not_the_preparation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = StatusPage("secret", port=0)
    try:
        second = StatusPage("secret", port=first.port or 0)
        assert second.port is None
        second.show({})
        second.close()
        assert "progress is not shown: port" in capsys.readouterr().err
    finally:
        first.close()


def test_a_client_that_never_completes_its_request_does_not_delay_the_end_of_the_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A close that waited for the client would outlast the timeout of the test.
    monkeypatch.setattr(pod._Handler, "timeout", 10 * PATIENCE)
    page = StatusPage("secret", port=0)
    with socket.create_connection(("127.0.0.1", page.port or 0)) as caller:
        caller.sendall(b"GET /status")
        # The next client waits, because the page is busy with the first.
        time.sleep(0.2)
        page.close()
        assert page.port is None

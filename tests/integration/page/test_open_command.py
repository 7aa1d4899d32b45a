"""``evergrad open``: the page of a run through a forwarded port, with its token, and of a run on this machine."""

import base64
import contextlib
import json
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pytest
import synthetic_run
from page_site import Site
from patience import PATIENCE

from evergrad_cli.cluster.client.errors import UnreachableError
from evergrad_cli.cluster.client.forwarding import forwarded
from evergrad_cli.cluster.commands import open as command
from evergrad_cli.cluster.commands.open import wait_for_interrupt
from evergrad_cli.main import main
from evergrad_common.contract import INSTANCE_HEADER
from evergrad_coordinator.edge.http import HttpResponse, StatusServer

RUN = {"metadata": {"name": "docs-lm"}, "spec": {}, "status": {"phase": "Running"}}


@pytest.fixture
def site() -> Iterator[Site]:
    one = Site()
    with one.serving("0.0.0.0"):
        one.train(3)
        yield one


class FakeCluster:
    """One run with one coordinator, whose pod's port is the site's."""

    namespace, host = "lab", "https://cluster"

    def __init__(self, site: Site) -> None:
        self.site = site
        self.connected: list[str] = []
        self.pods = [self.pod(0, "Failed"), self.pod(1, "Running")]

    def pod(self, attempt: int, phase: str) -> dict[str, Any]:
        return {
            "metadata": {
                "name": f"docs-lm-coordinator-{attempt}",
                "labels": {"evergrad.dev/attempt": str(attempt)},
            },
            "spec": {
                "containers": [
                    {"name": "sidecar"},
                    {
                        "name": "coordinator",
                        "ports": [{"name": "status", "containerPort": 29401}],
                    },
                ],
                "volumes": [
                    {"name": "evergrad-token", "secret": {"secretName": "docs-lm-token"}}
                ],
            },
            "status": {"phase": phase},
        }

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get(self, path: str, *, what: str, query: Any = None) -> dict[str, Any]:
        if path.endswith("/secrets/docs-lm-token"):
            return {"data": {"token": base64.b64encode(self.site.token.encode()).decode()}}
        assert path.endswith("/trainingruns/docs-lm"), path
        return RUN

    def items(self, path: str, *, what: str, query: Any = None) -> Iterator[dict[str, Any]]:
        assert query == {
            "labelSelector": "evergrad.dev/run=docs-lm,evergrad.dev/role=coordinator"
        }
        yield from self.pods

    def connect_to_pod(self, pod: str, port: int) -> socket.socket:
        assert port == 29401
        self.connected.append(pod)
        return socket.create_connection(("127.0.0.1", self.site.port), timeout=PATIENCE)


@pytest.fixture
def cluster(site: Site, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster(site)
    monkeypatch.setattr(command, "connect", lambda args: fake)
    return fake


def ask(address: str, *, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(address, headers=headers), timeout=PATIENCE) as answer:
        return str(answer.readline().decode())


def test_a_port_is_forwarded_and_the_page_gets_the_token(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: dict[str, Any] = {}

    def browse(target: str) -> bool:
        file = Path(unquote(urlsplit(target).path))
        seen["mode"] = (
            stat.S_IMODE(file.stat().st_mode),
            stat.S_IMODE(file.parent.stat().st_mode),
        )
        seen["file"] = file
        found = re.search(r'href="(http://[^"#]*)#token=([^"]*)"', file.read_text())
        assert found is not None
        address, token = found[1], unquote(found[2])
        seen["page"] = ask(address)
        with pytest.raises(HTTPError, match="401") as refused:
            ask(f"{address}live")
        refused.value.close()
        seen["live"] = ask(f"{address}live", token=token)
        # The pod is replaced: the next connection uses the new one.
        cluster.pods.append(cluster.pod(2, "Running"))
        ask(address)
        return True

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.webbrowser, "open", browse)
    monkeypatch.setattr(command, "wait_for_interrupt", interrupt)
    assert main(["open", "docs-lm"]) == 0
    assert seen["mode"] == (0o600, 0o700)
    assert seen["page"].startswith("<!doctype html>")
    assert seen["live"] == "event: update\n"
    assert cluster.connected[0] == "docs-lm-coordinator-1"
    assert cluster.connected[-1] == "docs-lm-coordinator-2"
    assert not seen["file"].exists()
    printed = capsys.readouterr()
    assert cluster.site.token not in printed.out + printed.err


OPEN = """
import signal
from evergrad_cli.cluster.commands.open import private_file, wait_for_interrupt
# The tests themselves may have been begun by nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if IS_IGNORED else signal.SIG_DFL)
try:
    with private_file("http://127.0.0.1:1/#token=secret") as file:
        print(file, flush=True)
        if IS_IGNORED:
            signal.raise_signal(signal.SIGHUP)
            print("goes on", flush=True)
        wait_for_interrupt()
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


@contextlib.contextmanager
def _opened(*, is_ignored: bool) -> Iterator[subprocess.Popen[str]]:
    """Run a process that shows a file until it is requested to end; it has ended after the block."""
    command_line = [sys.executable, "-c", OPEN.replace("IS_IGNORED", str(is_ignored))]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.wait(100)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_requested_exit_leaves_the_file_with_the_token(
    number: signal.Signals,
) -> None:
    with _opened(is_ignored=False) as process:
        assert process.stdout is not None
        file = Path(process.stdout.readline().strip())
        assert "secret" in file.read_text()
        process.send_signal(number)
        assert process.stdout.read() == "interrupted True\n"
    assert process.returncode == 0 and not file.parent.exists()


def test_a_closed_terminal_ends_no_command_started_with_nohup() -> None:
    with _opened(is_ignored=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "goes on\n"
        process.terminate()
        assert process.stdout.read() == "interrupted True\n"


def test_an_interrupt_at_any_time_of_the_wait_is_an_interrupt() -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    num_interrupts = 0
    try:
        for number in range(300):
            try:
                # From before the wait has begun until it has.
                signal.setitimer(signal.ITIMER_REAL, (1 + number % 100) * 1e-6)
                wait_for_interrupt()
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts == 300


def test_a_run_without_a_coordinator_is_refused_with_the_reason(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.pods = [cluster.pod(0, "Succeeded")]
    assert main(["open", "docs-lm"]) == 64
    assert "has no running coordinator, so there is no live page" in capsys.readouterr().err


def test_invalid_arguments_are_reported(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").touch()
    for port in ("70000", "-5"):
        assert main(["open", str(tmp_path), "--port", port]) == 64
        assert f"--port: {port} is not within 0 and 65535" in capsys.readouterr().err
    assert main(["open", "No_Name"]) == 64
    assert "cannot be the name of a run" in capsys.readouterr().err
    assert main(["open", "docs-lm", "--port", "70000"]) == 64
    assert "--port: 70000 is not within 0 and 65535" in capsys.readouterr().err


def test_a_port_in_use_is_reported(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["open", "docs-lm", "--port", str(port), "--no-browser"]) == 64
    assert f"--port: {port} cannot be used" in capsys.readouterr().err


def test_a_failed_connection_ends_alone(site: Site) -> None:
    errors: list[Exception] = []
    is_away = [True]

    def connect() -> socket.socket:
        if is_away.pop():
            raise UnreachableError("the pod is away")
        return socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE)

    with forwarded(connect, port=0, report=errors.append) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as lost:
            assert lost.recv(1) == b""
        is_away.append(False)
        assert ask(f"http://127.0.0.1:{port}/").startswith("<!doctype html>")
    assert [str(error) for error in errors] == ["the pod is away"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_a_run_directory_opens_the_page_of_its_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        command.webbrowser, "open", lambda target: opened.append(target) or True
    )
    assert main(["open", str(tmp_path)]) == 64
    assert "is not a run directory" in capsys.readouterr().err
    one = Site()
    with one.serving():
        (tmp_path / "coordinator").mkdir()
        file = tmp_path / "coordinator" / "address.json"
        address = {"port": 1, "statusPort": one.port, "instance": one.instance}
        file.write_text(json.dumps(address))
        assert main(["open", str(tmp_path)]) == 0
    assert opened == [one.url]
    assert capsys.readouterr().out == f"page {one.url}\n"
    # A killed process has left its file.
    assert main(["open", str(tmp_path)]) == 64


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize(
    ("instance", "answered", "is_ours"),
    [
        ("0123456789abcdef", "0123456789abcdef", True),
        ("0123456789abcdef", "fedcba9876543210", False),
        # Older versions have none.
        (None, None, True),
        (None, "fedcba9876543210", False),
        ("0123456789abcdef", None, False),
    ],
)
def test_another_run_at_the_port_of_a_killed_coordinator_is_not_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instance: str | None,
    answered: str | None,
    is_ours: bool,
    status: int,
) -> None:
    def answer(server: StatusServer, path: str, *, is_read: bool) -> HttpResponse:
        headers = {} if answered is None else {INSTANCE_HEADER: answered}
        # An unhealthy process shows the state that it still has.
        return HttpResponse(status, "text/plain", "ok\n", headers)

    monkeypatch.setattr(StatusServer, "_page", answer)
    file = tmp_path / "coordinator" / "address.json"
    file.parent.mkdir()
    one = Site(name="another")
    with one.serving():
        address = {"port": 1, "statusPort": one.port}
        named = {} if instance is None else {"instance": instance}
        file.write_text(json.dumps(address | named))
        expected = one.port if is_ours else None
        assert command.find_local_port(tmp_path) == expected


def test_a_run_without_a_coordinator_is_shown_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = synthetic_run.RunWriter(tmp_path, total_steps=400, name="docs-lm")
    run.write(synthetic_run.Process(last=157, ended="killed"))
    run.write(synthetic_run.Process(last=300, resumed_from=150, downtime_seconds=30.0))
    updates: list[dict[str, Any]] = []

    def browse(target: str) -> bool:
        assert ask(target).startswith("<!doctype html>")
        with pytest.raises(HTTPError, match="403") as refused:
            urlopen(
                Request(f"{target}live", headers={"Host": "evil.example"}), timeout=PATIENCE
            )
        refused.value.close()
        with urlopen(f"{target}live", timeout=PATIENCE) as events:
            updates.append(read_event(events))
            # It follows the files as they grow; half a line waits for its end.
            with (tmp_path / "metrics.jsonl").open("a") as file:
                row = json.dumps(
                    {
                        "step": 301,
                        "loss": 0.5,
                        "tokens": 10,
                        "step_seconds": 0.1,
                        "time": 2e9,
                    }
                )
                file.write(row[:20])
                file.flush()
                updates.append(read_event(events))
                file.write(row[20:] + "\n")
            while "steps" not in updates[-1]:
                updates.append(read_event(events))
        return True

    monkeypatch.setattr(command.webbrowser, "open", browse)
    monkeypatch.setattr(command, "wait_for_interrupt", lambda: None)
    assert main(["open", str(tmp_path)]) == 0
    first, last = updates[0], updates[-1]
    assert (first["status"]["run"], first["status"]["step"]) == ("docs-lm", 300)
    # Steps that were lost in the kill count by their last row.
    assert first["steps"]["x"] == list(range(1, 301))
    assert {"loss", "learning_rate", "grad_norm", "tokens_per_second"} <= set(
        first["steps"]["columns"]
    )
    assert first["evaluations"] and first["checkpoints"]
    assert first["status"]["restarts"] == {"process_started": 1}
    assert first["status"]["lostSeconds"]["process_started"] >= 30
    assert "steps" not in updates[1]
    assert (last["steps"]["x"][-1], last["status"]["loss"]) == (301, 0.5)


def read_event(events: Any) -> dict[str, Any]:
    assert events.readline() == b"event: update\n"
    found: dict[str, Any] = json.loads(events.readline().removeprefix(b"data: "))
    assert events.readline() == b"\n"
    return found

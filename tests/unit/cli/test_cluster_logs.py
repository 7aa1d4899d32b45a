"""``evergrad logs``: following a run through replaced pods, broken streams and its end."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evergrad_cli.cluster.client.errors import UnreachableError
from evergrad_cli.cluster.commands import log_following, waiting
from evergrad_cli.cluster.commands.log_following import (
    Line,
    LogFollower,
    LogReader,
    Selection,
)
from evergrad_cli.main import main

RUN = "/apis/evergrad.dev/v1alpha1/namespaces/lab/trainingruns/docs-lm"
PODS = "/api/v1/namespaces/lab/pods"
Make = Callable[..., dict[str, Any]]
Api = Any
COMPLETE = {"type": "Complete", "status": "True", "reason": "Complete"}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(log_following, name, 0.02)
    monkeypatch.setattr(waiting.WaitLimits, "after", lambda self, error: None)


def call(api: Api, *arguments: str) -> int:
    return main(["logs", "docs-lm", "--kubeconfig", api.kubeconfig, *arguments])


def pod(
    index: int | None, attempt: int = 0, *, state: str = "running", restarts: int = 0
) -> dict[str, Any]:
    role = "coordinator" if index is None else "node"
    labels = {"evergrad.dev/role": role, "evergrad.dev/attempt": str(attempt)}
    if index is not None:
        labels["evergrad.dev/index"] = str(index)
    phase = {"running": "Running", "waiting": "Pending", "terminated": "Failed"}[state]
    return {
        "metadata": {
            "name": f"docs-lm-{role if index is None else index}-{attempt}",
            "labels": labels,
        },
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {
            "phase": phase,
            "containerStatuses": [
                {"name": "trainer", "state": {state: {"x": 1}}, "restartCount": restarts}
            ],
        },
    }


def lines(*texts: str, first: int = 0) -> str:
    return "".join(
        f"2026-03-01T12:00:{first + number:02d}.5Z {text}\n"
        for number, text in enumerate(texts)
    )


def pods(api: Api, *items: dict[str, Any]) -> None:
    api.on("GET", PODS, {"metadata": {}, "items": list(items)})


def test_without_follow_the_output_of_the_first_node_is_printed_unchanged(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    pods(api, pod(0, 1), pod(0, 0, state="terminated"), pod(1), pod(None))
    api.on("GET", f"{PODS}/docs-lm-0-1/log", lines("one", "two"))
    assert call(api, "--tail", "5") == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert api.requests[-1].query == {
        "timestamps": "true",
        "container": "trainer",
        "tailLines": "5",
    }


def test_output_of_all_nodes_has_the_node_number_and_json_has_every_field(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    pods(api, pod(0, 1), pod(1), pod(2, state="waiting"))
    api.on("GET", f"{PODS}/docs-lm-0-1/log", lines("one"))
    api.on("GET", f"{PODS}/docs-lm-1-0/log", lines("two"))
    assert call(api, "--all") == 0
    captured = capsys.readouterr()
    assert captured.out == "[node 0 #1] one\n[node 1] two\n"
    assert captured.err == "warning: pod docs-lm-2-0: has no output yet; it is Pending.\n"
    assert call(api, "--node", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "node": 1, "role": "node", "attempt": 0, "pod": "docs-lm-1-0", "time": "2026-03-01T12:00:00.5Z", "line": "two",
    }  # fmt: skip


def test_previous_shows_an_older_pod_or_the_previous_container(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    pods(api, pod(0, 1), pod(0, 0, state="terminated"), pod(None, restarts=1))
    api.on("GET", f"{PODS}/docs-lm-0-0/log", lines("the end"))
    api.on("GET", f"{PODS}/docs-lm-coordinator-0/log", lines("crashed"))
    assert call(api, "--previous") == call(api, "--coordinator", "--previous") == 0
    assert capsys.readouterr().out == "the end\ncrashed\n"
    logs = [
        request.query.get("previous")
        for request in api.requests
        if request.path.endswith("/log")
    ]
    assert logs == [None, "true"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--node", "7"), "there is no pod of node 7"),
        (("--previous",), "has no earlier attempt"),
        (("-f", "--previous"), "cannot be followed"),
        (("--tail", "-1"), "-1 is negative"),
    ],
)
def test_missing_output_is_reported(
    api: Api,
    make_run: Make,
    arguments: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.on("GET", RUN, make_run())
    pods(api, pod(0))
    assert call(api, *arguments) == 64
    assert told in capsys.readouterr().err


def test_a_run_without_pods_refers_to_its_volume(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run(phase="Complete"))
    pods(api)
    assert call(api) == 64
    assert (
        "has no pods; it is Complete. What it printed earlier is on its volume, in logs/."
        in capsys.readouterr().err
    )


class Scenario:
    """A run whose node 0 is replaced while it is followed, and which then ends."""

    def __init__(self, api: Api, make_run: Make) -> None:
        self._api, self._make_run = api, make_run
        self._lock = threading.Lock()
        self.streams: dict[str, list[Any]] = {}
        self.is_over = False
        api.on("GET", RUN, self._run)

    def stream(self, name: str, *answers: Any) -> None:
        """Set the responses to requests for the output of pod ``name``; a function is called first."""
        self.streams[name] = list(answers)
        self._api.on("GET", f"{PODS}/{name}/log", lambda request: self._next(name))

    def ending(self, *texts: str) -> Callable[[], str]:
        """The final response: the run has ended when these lines are read."""

        def answer() -> str:
            self.is_over = True
            return lines(*texts)

        return answer

    def _next(self, name: str) -> Any:
        with self._lock:
            rest = self.streams[name]
            answer = rest.pop(0) if rest else ""
        answer = answer() if callable(answer) else answer
        return answer if isinstance(answer, tuple) else (200, answer)

    def _run(self, request: Any) -> tuple[int, Any]:
        over = {"phase": "Complete", "conditions": [COMPLETE]} if self.is_over else {}
        return 200, self._make_run(**over)


def test_follow_switches_to_the_replacement_of_a_pod_and_ends_with_the_run(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = Scenario(api, make_run)
    pods(api, pod(0), pod(1))

    def killed() -> str:
        pods(api, pod(0, state="terminated"), pod(0, 1), pod(1))
        return lines("step 1", "killed")

    def done() -> str:
        scenario.is_over = True
        pods(api, pod(0, 1, state="terminated"), pod(1))
        return lines("step 2", "complete", first=10)

    scenario.stream("docs-lm-0-0", killed)
    scenario.stream("docs-lm-0-1", done)
    assert call(api, "-f") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "[node 0] step 1",
        "[node 0] killed",
        "[node 0 #1] step 2",
        "[node 0 #1] complete",
    ]
    assert captured.err == "trainingrun/docs-lm is complete\n"


def test_a_broken_stream_resumes_without_a_lost_or_repeated_line(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = Scenario(api, make_run)
    pods(api, pod(0))

    scenario.stream(
        "docs-lm-0-0",
        lines("one", "two"),
        (500, "the server restarts"),
        scenario.ending("one", "two", "three"),
    )
    assert call(api, "-f") == 0
    assert capsys.readouterr().out.splitlines() == [
        "[node 0] one",
        "[node 0] two",
        "[node 0] three",
    ]
    since = [
        request.query.get("sinceTime")
        for request in api.requests
        if request.path.endswith("/log")
    ]
    assert since[:3] == [None, "2026-03-01T12:00:01.5Z", "2026-03-01T12:00:01.5Z"]


def test_follow_waits_for_pods_and_ends_if_the_run_is_deleted(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {
        "kind": "Status",
        "message": "not found",
        "details": {"name": "docs-lm", "kind": "trainingruns"},
    }
    answers = [make_run(phase="Suspended"), make_run(phase="Suspended"), None]

    def run(request: Any) -> tuple[int, Any]:
        answer = answers.pop(0) if answers else None
        return (200, answer) if answer else (404, gone)

    api.on("GET", RUN, run)
    pods(api)
    assert call(api, "-f", "--all") == 0
    assert capsys.readouterr().err.splitlines() == [
        "No pods: the run is Suspended. Waiting.",
        "The run was deleted.",
    ]


def test_follow_ends_for_a_run_without_pods_that_needs_a_person(
    api: Api,
    make_run: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waiting, "STALLED_SECONDS", 0.0)
    stalled = {"type": "Stalled", "status": "True", "reason": "InvalidSpec"}
    facts = {"phase": "Waiting", "reason": "InvalidSpec", "message": "spec.profile: no"}
    api.on("GET", RUN, make_run(conditions=[stalled], **facts))
    api.on("GET", PODS, {"metadata": {}, "items": []})
    arguments = ["logs", "docs-lm", "-f", "--kubeconfig", api.kubeconfig]
    assert main(arguments) == 64
    assert "trainingrun/docs-lm waits for you; InvalidSpec: spec.profile: no" in (
        capsys.readouterr().err
    )


def test_if_the_first_node_stays_away_another_is_followed(
    api: Api,
    make_run: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(log_following, "_GONE_SECONDS", 0.05)
    scenario = Scenario(api, make_run)
    pods(api, pod(0), pod(1))

    def killed() -> str:
        pods(api, pod(0, state="terminated"), pod(1))
        return lines("killed")

    scenario.stream("docs-lm-0-0", killed)
    scenario.stream("docs-lm-1-0", scenario.ending("going on"))
    assert call(api, "-f") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["[node 0] killed", "[node 1] going on"]
    assert "Node 0 is gone. Following node 1." in captured.err


def test_a_node_that_starts_late_is_followed_in_addition_to_its_substitute(
    api: Api,
    make_run: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(log_following, "_GONE_SECONDS", 0.05)
    scenario = Scenario(api, make_run)
    pods(api, pod(0, state="waiting"), pod(1))

    def late() -> str:
        pods(api, pod(0), pod(1))
        return ""

    scenario.stream("docs-lm-1-0", late)
    scenario.stream("docs-lm-0-0", scenario.ending("the run's words"))
    assert call(api, "-f") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["[node 0] the run's words"]
    assert captured.err.splitlines()[:2] == [
        "Node 0 is gone. Following node 1.",
        "Node 0 has started. Following it, too.",
    ]


def test_follow_continues_after_a_failure_that_a_new_nonce_clears(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"type": "Failed", "status": "True", "reason": "OutOfMemory"}
    spec = {"restartNonce": "second"}
    before = make_run(spec=spec, phase="Failed", restartNonce="first", conditions=[failed])
    answers = [before, before, make_run(spec=spec, restartNonce="second")]
    over = make_run(spec=spec, restartNonce="second", conditions=[COMPLETE])
    api.on("GET", RUN, lambda request: (200, answers.pop(0) if answers else over))
    pods(api)
    assert call(api, "-f") == 0
    assert "trainingrun/docs-lm is complete" in capsys.readouterr().err


class BreakingCluster:
    """A cluster with one pod. Each of its streams breaks after ``lines_each`` lines, except the last."""

    namespace = "lab"

    def __init__(self, make_run: Make, *, num_lines: int, lines_each: int) -> None:
        self._make_run = make_run
        self._lines = [
            f"2026-03-01T12:{n // 60:02d}:{n % 60:02d}.5Z {n}" for n in range(num_lines)
        ]
        self._lines_each = lines_each
        self.num_streams = 0
        self.is_over = False

    def get(self, path: str, **rest: Any) -> dict[str, Any]:
        over = {"phase": "Complete", "conditions": [COMPLETE]} if self.is_over else {}
        return self._make_run(**over)

    def items(self, path: str, **rest: Any) -> Iterator[dict[str, Any]]:
        yield pod(0, state="terminated" if self.is_over else "running")

    def lines(self, path: str, *, query: dict[str, str], **rest: Any) -> Iterator[bytes]:
        self.num_streams += 1
        # Like the API server: sinceTime counts in whole seconds, and that second is sent again.
        since = query.get("sinceTime", "")[:19]
        todo = [line for line in self._lines if line[:19] >= since]
        for line in todo[: self._lines_each + bool(since)]:
            yield line.encode()
        if len(todo) > self._lines_each + bool(since) or not todo:
            raise UnreachableError("output of the pod: connection reset")
        self.is_over = True


def follow(cluster: Any, show: Callable[[Line], None]) -> list[str]:
    """Follow the whole run of ``cluster``; returns the remarks."""
    remarks: list[str] = []
    reader = LogReader(cluster, show, tail=None)
    LogFollower(cluster, "docs-lm", Selection(), reader, remark=remarks.append).follow()
    return remarks


def test_a_stream_that_breaks_after_some_lines_resumes_after_the_last_line(
    make_run: Make,
) -> None:
    shown: list[str] = []
    # More breaks than a reader tolerates without a line.
    cluster = BreakingCluster(make_run, num_lines=200, lines_each=2)
    assert follow(cluster, lambda line: shown.append(line.text)) == []
    assert shown == [str(number) for number in range(200)]
    assert cluster.num_streams > 64


def test_output_that_cannot_be_read_for_long_is_reported_once_and_retried(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_following, "_LONGEST_PAUSE_SECONDS", 0.0)
    shown: list[str] = []
    cluster = BreakingCluster(make_run, num_lines=3, lines_each=3)
    whole = cluster.lines

    def away_for_long(path: str, **rest: Any) -> Iterator[bytes]:
        cluster.num_streams += 1
        if cluster.num_streams < 100:
            raise UnreachableError("output of the pod: no route to host.")
        return whole(path, **rest)

    monkeypatch.setattr(cluster, "lines", away_for_long)
    told = (
        "The output of pod docs-lm-0-0 cannot be read; output of the pod: no route to host. "
        "Trying again."
    )
    assert follow(cluster, lambda line: shown.append(line.text)) == [told]
    assert shown == ["0", "1", "2"]


def test_follow_ends_when_its_output_is_closed(make_run: Make) -> None:
    def print_to_closed_pipe(line: Line) -> None:
        raise BrokenPipeError

    cluster = BreakingCluster(make_run, num_lines=20, lines_each=2)
    with pytest.raises(BrokenPipeError):
        follow(cluster, print_to_closed_pipe)
    assert not cluster.is_over

"""The output for users about a run on a cluster: tables, advice, and which pod's output is shown.

Values in, text out.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad_cli.cluster.client import refusals
from evergrad_cli.cluster.client.arguments import run_name, seconds_of
from evergrad_cli.cluster.client.errors import NotFoundError, RefusedError, UnreachableError
from evergrad_cli.cluster.commands.checkpoints import document as describe_checkpoints
from evergrad_cli.cluster.commands.list import render as render_list
from evergrad_cli.cluster.commands.log_following import (
    Line,
    Selection,
    choose,
    order_of,
    show_line,
    split_line,
)
from evergrad_cli.cluster.commands.status import StatusFacts, render
from evergrad_cli.cluster.commands.status import document as status_document
from evergrad_cli.cluster.render import advice, runs
from evergrad_cli.cluster.render.advice import advise
from evergrad_cli.cluster.render.runs import (
    Pod,
    Run,
    parse_events,
    parse_pods,
    parse_run,
    row_of,
)
from evergrad_cli.cluster.render.text import (
    age,
    bar,
    parse_short_count,
    parse_time,
    printable,
    table,
)
from evergrad_operator.core.objects import names

Make = Callable[..., dict[str, Any]]
NOW = parse_time("2026-03-01T13:00:00Z") or 0.0


def raw_condition(
    kind: str, status: str = "True", reason: str = "X", message: str = ""
) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-03-01T12:10:00Z",
    }


# ---- contract with the operator ----------------------------------------------------------------------------


def test_labels_and_waiting_reasons_match_the_operator() -> None:
    assert (runs.LABEL_RUN, runs.LABEL_INDEX) == (names.LABEL_RUN, names.LABEL_INDEX)
    assert (runs.LABEL_ATTEMPT, runs.LABEL_ROLE) == (names.LABEL_ATTEMPT, names.LABEL_ROLE)
    assert (runs.NODE, runs.COORDINATOR) == (names.ROLE_NODE, names.ROLE_COORDINATOR)
    assert set(advice._WHERE) <= set(names.Reason)


# ---- pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0s"),
        (119, "119s"),
        (125, "2m5s"),
        (600, "10m"),
        (9000, "150m"),
        (12600, "3h30m"),
        (200000, "2d7h"),
    ],
)
def test_ages_are_formatted_as_kubectl_formats_them(
    seconds: float | None, text: str
) -> None:
    assert age(seconds) == text


def test_only_a_complete_progress_bar_is_full() -> None:
    assert bar(0.999, width=10) == "█████████░"
    assert bar(1.0, width=4, is_unicode=False) == "####"
    assert bar(-1, width=4, is_unicode=False) == "...."


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("45", 45),
        ("0.5", 0.5),
        ("0", float("inf")),
    ],
)
def test_timeouts_are_written_as_kubectl_accepts_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", "1d", "5x"])
def test_an_invalid_timeout_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a time"):
        seconds_of(text)


@pytest.mark.parametrize(
    "text", ["docs-lm", "trun/docs-lm", "trainingrun.evergrad.dev/docs-lm"]
)
def test_a_run_may_be_named_as_kubectl_prints_it(text: str) -> None:
    assert run_name(text) == "docs-lm"


def test_foreign_text_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31mb\nc\u202ed\u2028e") == "a [31mb c d e"
    assert table(("A", "B"), [("wide", "x\ny"), ("字", "z")]) == [
        "A      B",
        "wide   x y",
        "字     z",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("41.2k", 41200.0),
        ("2.413", 2.413),
        (512, 512.0),
        ("1.5M", 1.5e6),
        ("–", None),
        (None, None),
        ("", None),
    ],
)
def test_short_counts_are_parsed_to_numbers(text: Any, number: float | None) -> None:
    assert parse_short_count(text) == number


def test_times_are_parsed_with_and_without_fractions_and_offsets() -> None:
    assert parse_time("2026-03-01T13:00:00.250000000Z") == NOW + 0.25
    assert parse_time("2026-03-01T14:00:00+01:00") == NOW
    assert parse_time("yesterday") is parse_time(None) is None


# ---- runs --------------------------------------------------------------------------------------------------


def test_the_list_matches_the_kubectl_columns(make_run: Make) -> None:
    new = make_run("new")
    del new["status"]
    found = [parse_run(make_run()), parse_run(new)]
    assert render_list(found, now=NOW) == [
        "NAME      PHASE     NODES   STEP         LOSS    TOK/S   ETA     CHECKPOINT   RESTARTS   AGE",
        "docs-lm   Running   3/4     1200/20000   2.413   41.2k   5h12m   1100         2          60m",
        "new       Pending   –       –            –       –       –       –            0          60m",
    ]
    assert render_list(found, now=NOW, with_namespace=True)[1].startswith("lab ")


def test_the_wide_list_shows_usage_with_and_without_accelerators(
    make_run: Make,
) -> None:
    used = {"podHours": "41.20", "gpuHours": "0.00", "waste": "6%"}
    found = [parse_run(make_run(usage=used)), parse_run(make_run("new", usage=None))]
    head, used_row, new_row = render_list(found, now=NOW, is_wide=True)
    assert head.split()[-5:] == ["POD-HOURS", "GPU-HOURS", "WASTE", "REASON", "MESSAGE"]
    assert used_row.split()[10:13] == ["41.20", "0.00", "6%"]
    assert new_row.split()[10:13] == ["–", "–", "–"]


def test_a_malformed_status_can_be_shown(make_run: Make) -> None:
    for broken in (
        None,
        "text",
        [],
        {
            "nodes": 3,
            "progress": [],
            "conditions": {},
            "restarts": "many",
            "lastFailure": "x",
        },
    ):
        raw = {**make_run(), "status": broken}
        assert render(StatusFacts(parse_run(raw), (), (), ()), now=NOW)


def test_preparation_progress_is_shown_until_there_is_a_step(
    make_run: Make,
) -> None:
    done = {
        "work": "tokenize",
        "source": "docs",
        "percent": 25,
        "documents": 7,
        "tokens": 1500,
    }
    raw = make_run(phase="Preparing", reason="Preparing", progress={}, preparation=done)
    (line,) = [one for one in render(facts(raw), now=NOW) if one.startswith("Data:")]
    assert line.split()[1:3] == ["tokenize", "docs"]
    assert line.endswith("25%  7 documents  1.5k tokens")
    assert status_document(facts(raw), now=NOW)["run"]["preparation"] == done
    text = "\n".join(render(facts(make_run(preparation=done)), now=NOW))
    assert "Data:" not in text, "the run trains"


def facts(
    run: dict[str, Any], *pods: dict[str, Any], events: tuple[dict[str, Any], ...] = ()
) -> StatusFacts:
    return StatusFacts(
        parse_run(run), tuple(parse_pods(pods)), tuple(parse_events(events)), ()
    )


def raw_pod(
    name: str, index: int | None, attempt: int, state: dict[str, Any], **more: Any
) -> dict[str, Any]:
    labels = {
        "evergrad.dev/attempt": str(attempt),
        "evergrad.dev/role": "coordinator" if index is None else "node",
    }
    if index is not None:
        labels["evergrad.dev/index"] = str(index)
    phase = (
        "Failed"
        if "terminated" in state
        else "Running"
        if "running" in state
        else "Pending"
    )
    return {
        "metadata": {
            "name": name,
            "labels": labels,
            "creationTimestamp": "2026-03-01T12:58:00Z",
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}]},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "trainer", "state": state, **more}],
        },
    }


def test_the_status_of_a_run_with_a_failure_shows_the_root_cause(make_run: Make) -> None:
    failure = {
        "cause": "WorkerCrash", "node": 1, "rank": 1, "step": 1180, "exitCode": 1, "at": "2026-03-01T12:59:00Z",
        "message": "Traceback …\nValueError: \x1b[31mboom",
    }  # fmt: skip
    event = {
        "type": "Warning", "reason": "Restarting", "message": "node 1 failed", "count": 3,
        "lastTimestamp": "2026-03-01T12:59:30Z", "involvedObject": {"kind": "TrainingRun", "name": "docs-lm"},
    }  # fmt: skip
    shown = facts(
        make_run(lastFailure=failure),
        raw_pod("docs-lm-1-0", 1, 0, {"terminated": {"exitCode": 1, "reason": "Error"}}),
        raw_pod("docs-lm-1-1", 1, 1, {"running": {}}),
        raw_pod("docs-lm-coordinator-0", None, 0, {"running": {}}),
        events=(event,),
    )
    text = "\n".join(render(shown, now=NOW))
    assert "█░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  1,200/20,000  6%" in text
    assert "Restarts:   2 (2 Preempted)" in text
    assert (
        "  WorkerCrash: node 1, rank 1, step 1180, exit code 1, 60s ago\n    Traceback …\n    "
        "ValueError:  [31mboom" in text
    )
    assert "   1             docs-lm-1-1             Running" in text
    assert "docs-lm-1-0" not in text
    assert "30s (x3)   Warning   Restarting" in text


def test_an_injected_sidecar_does_not_hide_the_state_or_name_of_the_trainer_container() -> (
    None
):
    raw = raw_pod(
        "docs-lm-0-0",
        0,
        0,
        {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        restartCount=0,
    )
    raw["spec"]["containers"].insert(0, {"name": "istio-proxy"})
    raw["status"]["phase"] = "Running"
    raw["status"]["containerStatuses"].insert(
        0, {"name": "istio-proxy", "state": {"running": {}}, "restartCount": 4}
    )
    [pod] = parse_pods([raw])
    assert (pod.container, pod.phase, pod.restarts) == ("trainer", "OOMKilled", 0)


def test_the_status_of_a_thousand_nodes_is_limited_to_two_screens(make_run: Make) -> None:
    many = [
        raw_pod(f"docs-lm-{index}-0", index, 0, {"running": {}}) for index in range(1000)
    ]
    lines = render(facts(make_run(), *many), now=NOW)
    assert len(lines) < 80
    assert any(
        "and 968 more: kubectl get pods -l evergrad.dev/run=docs-lm" in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ({"running": {}}, "Running"),
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            "ImagePullBackOff",
        ),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "OOMKilled"),
        ({"terminated": {"exitCode": 64, "reason": "Error"}}, "Error (64)"),
    ],
)
def test_ended_pods_are_shown_with_their_cause(state: dict[str, Any], shown: str) -> None:
    (pod,) = parse_pods([raw_pod("docs-lm-0-0", 0, 0, state)])
    assert pod.phase == shown


# ---- advice ------------------------------------------------------------------------------------------------


def advice_of(raw: dict[str, Any]) -> str:
    return "\n".join(advise(parse_run(raw), now=NOW))


@pytest.mark.parametrize(
    "reason", [*sorted(advice._WHERE), "AdmissionRefused", "SomethingNew"]
)
def test_a_waiting_run_is_shown_with_a_command_that_shows_more(
    reason: str, make_run: Make
) -> None:
    text = advice_of(make_run(phase="Waiting", reason=reason))
    assert "The message gives" in text and ("kubectl" in text or "evergrad" in text)
    assert "{" not in text.replace("'{.status.image}'", "")


@pytest.mark.parametrize("reason", ["UserError", "OutOfMemory", "SomethingNew"])
def test_a_failed_run_is_shown_with_its_output_and_the_next_command(
    reason: str, make_run: Make
) -> None:
    raw = make_run(
        phase="Failed",
        reason=reason,
        conditions=[raw_condition("Failed", reason=reason)],
        lastFailure={"node": 2},
    )
    text = advice_of(raw)
    assert "evergrad logs docs-lm --node 2" in text and "evergrad restart docs-lm" in text


def test_advice_covers_the_other_states(make_run: Make) -> None:
    unseen = make_run()
    del unseen["status"]
    assert "No operator has processed it for 60m" in advice_of(unseen)
    deleted = make_run()
    deleted["metadata"]["deletionTimestamp"] = "2026-03-01T12:59:00Z"
    assert "keeps its checkpoints" in advice_of(deleted)
    assert "evergrad resume" in advice_of(
        make_run(spec={"suspend": True}, phase="Suspended")
    )
    stopped = {"phase": "Suspended", "reason": "StoppedOnRequest"}
    assert "evergrad resume" in advice_of(make_run(**stopped))
    not_finite = advice_of(make_run(phase="Suspended", reason="NonFinite"))
    assert (
        "spec.training.skipSteps" in not_finite and "evergrad resume docs-lm" in not_finite
    )
    at_its_stop = advice_of(
        make_run(spec={"training": {"stop": {"afterStep": 1100}}}, **stopped)
    )
    # The step may be raised in place: the advice never deletes the run, whose claim may go with it.
    assert "has finished step 1100" in at_its_stop
    assert "raise or remove spec.training.stop.afterStep in its file" in at_its_stop
    assert "then: evergrad resume docs-lm" in at_its_stop
    assert "delete" not in at_its_stop
    stalled = make_run(
        conditions=[raw_condition("Progressing", "False", message="no step for 20m")]
    )
    assert "No step for a long time (no step for 20m)" in advice_of(stalled)
    assert "complete.json" in advice_of(
        make_run(phase="Complete", conditions=[raw_condition("Complete")])
    )


@pytest.mark.parametrize(
    ("storage", "volume", "goes"),
    [
        ({}, None, False),
        ({"whenDeleted": "Delete"}, None, True),
        ({"whenDeleted": "Delete"}, {"goesWithRun": True}, True),
        # Other runs use the claim.
        ({"whenDeleted": "Delete"}, {"goesWithRun": False}, False),
        # The claim still has its owner.
        ({"whenDeleted": "Retain"}, {"goesWithRun": True}, True),
    ],
)
def test_for_a_run_that_is_being_deleted_the_fate_of_its_checkpoints_is_shown(
    make_run: Make, storage: dict[str, Any], volume: Any, goes: bool
) -> None:
    raw = make_run(spec={"storage": storage}, **({"volume": volume} if volume else {}))
    raw["metadata"]["deletionTimestamp"] = "2021-01-01T00:00:00Z"
    told = advice_of(raw)
    assert ("checkpoints is deleted with it" in told) is goes
    assert ("Claim docs-lm keeps its checkpoints" in told) is not goes


def test_a_run_of_another_controller_is_shown_with_that_controller(make_run: Make) -> None:
    raw = make_run(spec={"managedBy": "kueue.x-k8s.io/multikueue"})
    del raw["status"]
    facts = StatusFacts(parse_run(raw), (), (), ())
    lines = render(facts, now=NOW)
    assert "Managed by: kueue.x-k8s.io/multikueue" in lines
    assert "kueue.x-k8s.io/multikueue manages this run (spec.managedBy)" in advice_of(raw)
    assert "No operator has processed it" not in advice_of(raw)
    assert (
        status_document(facts, now=NOW)["run"]["managedBy"] == "kueue.x-k8s.io/multikueue"
    )
    # The operator's own name is equal to no name.
    ours = make_run(spec={"managedBy": "evergrad.dev/operator"})
    assert not any(
        "Managed by" in line
        for line in render(StatusFacts(parse_run(ours), (), (), ()), now=NOW)
    )


def test_a_waiting_pod_is_named(make_run: Make) -> None:
    waiting = raw_pod(
        "docs-lm-0-0",
        0,
        0,
        {"waiting": {"reason": "ErrImagePull", "message": "no such image"}},
    )
    lines = advise(
        parse_run(make_run(phase="Waiting", reason="ImagePullFailed")),
        parse_pods([waiting]),
        now=NOW,
    )
    assert lines[-1] == "More about a pod that waits: kubectl describe pod docs-lm-0-0"


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Starting"},
        {"phase": "Suspended"},
        {"phase": "Suspended", "reason": "NonFinite"},
        *({"phase": "Waiting", "reason": reason} for reason in (*advice._WHERE, "Other")),
        {"phase": "Failed", "conditions": [raw_condition("Failed")]},
        {"phase": "Complete", "conditions": [raw_condition("Complete")]},
        {"conditions": [raw_condition("Progressing", "False")]},
        {"phase": ""},
    ],
)
def test_every_suggested_command_ends_with_the_namespace_and_context_of_the_run(
    status: dict[str, Any], make_run: Make
) -> None:
    pods = parse_pods(
        [raw_pod("docs-lm-0-0", 0, 0, {"waiting": {"message": "no such image"}})]
    )
    place = " -n prod --context west"
    lines = advise(parse_run(make_run(**status)), pods, now=NOW, place=place)
    told = [line for line in lines if "evergrad " in line or "kubectl " in line]
    assert told and all(line.endswith(place) for line in told)


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind", "told"),
    [
        (404, b"404 page not found", NotFoundError, "does not know TrainingRuns"),
        (
            404,
            b'{"kind":"Status","details":{"name":"lab","kind":"namespaces"}}',
            NotFoundError,
            "namespace lab: does not exist",
        ),
        (
            401,
            b'{"kind":"Status","message":"Unauthorized"}',
            RefusedError,
            "does not accept these credentials",
        ),
        (
            403,
            b'{"kind":"Status","message":"exceeded quota: q"}',
            RefusedError,
            "beyond the namespace's quota",
        ),
        (
            403,
            b'{"kind":"Status","details":{"causes":[{"reason":"NamespaceTerminating"}]}}',
            RefusedError,
            "The namespace is being deleted: name another with -n",
        ),
        (
            403,
            b'{"kind":"Status","message":"may not create what is being terminated"}',
            RefusedError,
            "Ask for the right",
        ),
        (
            409,
            b'{"kind":"Status","message":"modified"}',
            RefusedError,
            "changed by another client",
        ),
        (
            400,
            b'{"kind":"Status","message":"strict decoding error: unknown field \\"spec.nods\\""}',
            RefusedError,
            "spec.nods",
        ),
        (429, b"slow down", UnreachableError, "slow down. Try again"),
        (500, b"\xff<html>", UnreachableError, "answers with 500"),
    ],
)
def test_server_errors_become_clear_messages(
    status: int, body: bytes, kind: type, told: str
) -> None:
    error = refusals.error_of(status, body, what="trainingrun docs-lm")
    assert type(error) is kind
    assert told in str(error)


# ---- output ------------------------------------------------------------------------------------------------


def pod(
    index: int | None,
    attempt: int = 0,
    *,
    is_over: bool = False,
    has_started: bool = True,
    restarts: int = 0,
) -> Pod:
    role = "coordinator" if index is None else "node"
    name = f"docs-lm-{'coordinator' if index is None else index}-{attempt}"
    return Pod(
        name,
        role,
        index,
        attempt,
        "",
        False,
        is_over,
        has_started,
        restarts,
        "n1",
        "c",
        "",
        None,
    )


COORDINATOR = pod(None, 1, restarts=1)
PODS = [
    pod(0, 0, is_over=True),
    pod(0, 1),
    pod(1, 0),
    pod(2, 3, is_over=True),
    COORDINATOR,
    pod(None, 0, is_over=True),
]


@pytest.mark.parametrize(
    ("selection", "is_previous", "chosen"),
    [
        (Selection(), False, ["docs-lm-0-1"]),
        (Selection(is_all=True), False, ["docs-lm-0-1", "docs-lm-1-0", "docs-lm-2-3"]),
        (Selection(index=1), False, ["docs-lm-1-0"]),
        (Selection(index=7), False, []),
        (Selection(is_coordinator=True), False, ["docs-lm-coordinator-1"]),
        (Selection(is_all=True), True, ["docs-lm-0-0", "docs-lm-2-3"]),
        (Selection(index=0), True, ["docs-lm-0-0"]),
        (Selection(index=1), True, []),
        (Selection(is_coordinator=True), True, ["docs-lm-coordinator-0"]),
    ],
)
def test_pods_are_selected_by_the_options(
    selection: Selection, is_previous: bool, chosen: list[str]
) -> None:
    assert [one.name for one in choose(PODS, selection, is_previous=is_previous)] == chosen


def test_a_started_node_is_preferred_to_one_that_has_not_started() -> None:
    assert [
        one.index for one in choose([pod(0, has_started=False), pod(1)], Selection())
    ] == [1]
    assert [one.index for one in choose([pod(0, has_started=False)], Selection())] == [0]


def test_a_line_is_split_from_its_time_and_shown_with_its_node() -> None:
    line = split_line(pod(3, 2), b"2026-03-01T12:00:00.5Z step 7 \xff")
    assert (line.time, line.text) == ("2026-03-01T12:00:00.5Z", "step 7 \ufffd")
    assert (
        show_line(line, prefix=True, with_time=False, as_json=False)
        == "[node 3 #2] step 7 \ufffd"
    )
    assert show_line(line, prefix=False, with_time=True, as_json=False).startswith(
        "2026-03-01T12:00:00.5Z step 7"
    )
    assert '"node": 3, "role": "node", "attempt": 2' in show_line(
        line, prefix=True, with_time=False, as_json=True
    )
    spoken = Line(pod(3, 2), "", "[node 3 rank 1] step 7")
    assert (
        show_line(spoken, prefix=True, with_time=True, as_json=False)
        == "[node 3 #2 rank 1] step 7"
    )
    coordinator = Line(pod(None), "", "hello")
    assert (
        show_line(coordinator, prefix=True, with_time=False, as_json=False)
        == "[coordinator] hello"
    )
    assert split_line(pod(0), b"no time").text == "no time"


def test_times_of_lines_are_ordered_although_trailing_zeros_are_dropped() -> None:
    stamps = [
        "2026-03-01T12:00:00Z",
        "2026-03-01T12:00:00.000000001Z",
        "2026-03-01T12:00:00.1Z",
        "2026-03-01T12:00:00.11Z",
    ]
    assert sorted([stamps[2], stamps[0], stamps[3], stamps[1]], key=order_of) == stamps


@pytest.mark.parametrize("status", [None, {"observedGeneration": -1}])
def test_a_run_without_a_status_is_pending(
    status: dict[str, int] | None, make_run: Make
) -> None:
    run: Run = parse_run({**make_run(), "status": status})
    assert (run.phase, run.is_observed, run.is_current, run.is_over) == (
        "Pending",
        False,
        False,
        False,
    )


# ---- documents ---------------------------------------------------------------------------------------------


def documented(command: str) -> set[str]:
    """Return the keys that docs/operate/cluster-cli.md lists for a command's document."""
    text = (
        (Path(__file__).resolve().parents[3] / "docs/operate/cluster-cli.md")
        .read_text()
        .partition("## JSON")[2]
    )
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith((f"| `{command}`", f"{command}: "))
    )
    shape = line.rpartition(" | ")[2].partition("`; ")[0]
    return set(
        re.findall(
            r"[a-zA-Z]+",
            shape.replace("null or", "").replace("RUN +", "").replace("RUN", "", 1),
        )
    )


def test_json_documents_have_the_documented_keys(make_run: Make) -> None:
    run = parse_run(make_run())
    assert set(row_of(run, now=NOW)) == documented("RUN")
    assert set(describe_checkpoints(run, None, None, place="")) == documented("checkpoints")
    failure = {"cause": "WorkerCrash", "message": "boom"}
    attempt = {
        "pod": "docs-lm-0-0",
        "cause": "WorkerCrash",
        "exitCode": 1,
        "at": "2026-03-01T12:59:00Z",
    }
    event = {
        "reason": "Restarting",
        "involvedObject": {"kind": "TrainingRun", "name": "docs-lm"},
    }
    raw = make_run(lastFailure=failure, attempts=[attempt])
    shown = status_document(
        facts(raw, raw_pod("docs-lm-0-0", 0, 0, {"running": {}}), events=(event,)), now=NOW
    )
    keys = {*shown, *(set(shown["run"]) - set(row_of(run, now=NOW)))}
    for part in ("conditions", "pods", "attempts", "events"):
        keys |= set(shown[part][0])
    assert keys | set(shown["lastFailure"]) == documented("status") - {
        "what",
        "this",
        "user",
        "may",
        "not",
        "read",
        "sentence",
    }

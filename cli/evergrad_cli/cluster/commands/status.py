"""``evergrad status``: shows one run with its pods and events, and the next action for the user."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from evergrad_cli.cluster.client.api_client import Cluster, connect, core_path
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    given_place,
    is_run_directory,
    require_run_name,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import RefusedError
from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.commands.local_status import show_local_status
from evergrad_cli.cluster.commands.waiting import read_run
from evergrad_cli.cluster.render.advice import advise
from evergrad_cli.cluster.render.runs import (
    LABEL_RUN,
    Pod,
    Run,
    RunEvent,
    RunFailure,
    newest_of_each,
    parse_events,
    parse_pods,
    pod_row,
    row_of,
)
from evergrad_cli.cluster.render.text import (
    NOTHING,
    age,
    bar,
    parse_short_count,
    printable,
    printable_lines,
    table,
)
from evergrad_common.contract import ExitCode
from evergrad_common.text import short_count

NAME = "status"
EXAMPLES = """\
  evergrad status docs-lm
  evergrad status docs-lm --json | jq .run.percent
  evergrad status runs/docs-lm              # a run on this machine
  watch -n 5 evergrad status docs-lm"""
_NUM_EVENTS: Final = 10
_LONGEST_POD_LIST: Final = 32


@dataclass(frozen=True)
class StatusFacts:
    """A run with its pods and events.

    ``unknown`` names the lists that this user may not read. ``place`` has the options that commands in advice
    repeat.
    """

    run: Run
    pods: tuple[Pod, ...]
    events: tuple[RunEvent, ...]
    unknown: tuple[str, ...]
    place: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        help="name of a run on the cluster (also as trun/NAME), or run directory of a run on this machine",
    )
    parser.add_argument(
        "--events",
        type=int,
        default=_NUM_EVENTS,
        metavar="N",
        help=f"number of events to show (default: {_NUM_EVENTS})",
    )
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Show the status. Return 0 for each state of the run; ``wait`` has an exit code for each state."""
    if is_run_directory(args.name):
        return show_local_status(Path(args.name), as_json=args.json)
    args.name = require_run_name(args.name)
    with connect(args) as cluster:
        facts = replace(gather(cluster, args.name), place=given_place(args))
    now = time.time()
    if args.json:
        say_json(document(facts, now=now, num_events=args.events))
        return int(ExitCode.DONE)
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    for line in render(facts, now=now, num_events=args.events, is_unicode=is_unicode):
        say(line)
    return int(ExitCode.DONE)


def gather(cluster: Cluster, name: str) -> StatusFacts:
    """Read the run, its pods and their events. ``unknown`` names the lists that this user may not read."""
    run = read_run(cluster, name)
    unknown: list[str] = []
    pods = parse_pods(
        _try_items(cluster, "pods", {"labelSelector": f"{LABEL_RUN}={name}"}, unknown)
    )
    selector = {
        "fieldSelector": f"involvedObject.kind=TrainingRun,involvedObject.name={name}"
    }
    raw = _try_items(cluster, "events", selector, unknown)
    # An event exists for an hour after its object is deleted. Leave out events of an earlier run with this
    # name.
    raw = [
        item
        for item in raw
        if part(item, "involvedObject").get("uid") in (run.uid, None, "")
    ]
    # Show only warnings of pods: each pod has about six events just for its start.
    if pods and "events" not in unknown:
        names = {pod.name for pod in pods}
        warnings = _try_items(
            cluster,
            "events",
            {"fieldSelector": "involvedObject.kind=Pod,type=Warning"},
            unknown,
        )
        raw += [
            item for item in warnings if part(item, "involvedObject").get("name") in names
        ]
    return StatusFacts(run, tuple(pods), tuple(parse_events(raw)), tuple(unknown))


def _try_items(
    cluster: Cluster, kind: str, query: dict[str, str], unknown: list[str]
) -> list[dict[str, Any]]:
    try:
        return list(
            cluster.items(core_path(kind, cluster.namespace), what=kind, query=query)
        )
    except RefusedError:
        unknown.append(kind)
        return []


def document(
    facts: StatusFacts, *, now: float, num_events: int = _NUM_EVENTS
) -> dict[str, Any]:
    """Return the run as one JSON document."""
    run = facts.run
    details = {
        "image": run.image or None,
        "profile": run.profile or None,
        "started": run.started,
        "completed": run.completed,
        "preparation": dict(run.preparation) or None,
        "evaluation": dict(run.evaluation) or None,
        "usage": dict(run.usage) or None,
        "suspend": run.wants_suspension,
        "managedBy": run.managed_by or None,
        "claim": run.claim,
        "folder": run.folder,
        "restartsByCause": dict(run.restarts_by_cause),
        "failuresWithoutProgress": run.failures_without_progress,
    }
    # Keys that `evergrad list --json` also has come from one function, so that scripts read both documents
    # alike.
    return {
        "run": {**row_of(run, now=now), **details},
        "conditions": [asdict(condition) for condition in run.conditions],
        "pods": [pod_row(pod) for pod in facts.pods],
        "lastFailure": None
        if run.last_failure is None
        else _camel(asdict(run.last_failure)),
        "attempts": [_camel(asdict(ended)) for ended in run.attempts],
        "events": [asdict(event) for event in facts.events[-num_events:]]
        if num_events > 0
        else [],
        "unknown": list(facts.unknown),
        "next": advise(run, facts.pods, now=now, place=facts.place),
    }


def _camel(raw: dict[str, Any]) -> dict[str, Any]:
    return {"exitCode" if key == "exit_code" else key: value for key, value in raw.items()}


def render(
    facts: StatusFacts,
    *,
    now: float,
    num_events: int = _NUM_EVENTS,
    is_unicode: bool = True,
) -> list[str]:
    """Return the run as lines of text."""
    # Show the state, then its reasons from the run to its pods, and last the next action.
    run = facts.run
    lines = _head(run, now, is_unicode=is_unicode)
    rows = [
        (
            "",
            one.type,
            one.status,
            age(None if one.since is None else now - one.since),
            one.reason,
            one.message,
        )
        for one in run.conditions
    ]
    head = ("", "TYPE", "STATUS", "SINCE", "REASON", "MESSAGE")
    lines += _section("Conditions", table(head, rows) if rows else [])
    lines += _section("Pods", _pods(facts, now))

    if run.last_failure is not None:
        lines += _section("Last failure", _describe_failure(run.last_failure, now))
    # Show the newest events last, next to the prompt.
    if num_events > 0:
        lines += _section("Events", _list_events(facts, now, num_events))
    next_lines = advise(run, facts.pods, now=now, place=facts.place)
    return [*lines, *_section("Next", [f"  {printable(line)}" for line in next_lines])]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"{title}:", *lines] if lines else []


def _describe_failure(failure: RunFailure, now: float) -> list[str]:
    """Return the root cause with its whole message.

    A table would cut its lines, and a traceback has many.
    """
    where = (
        ("node", failure.node),
        ("rank", failure.rank),
        ("step", failure.step),
        ("exit code", failure.exit_code),
    )
    told = ", ".join(f"{label} {value}" for label, value in where if value is not None)
    when = "" if failure.at is None else f", {age(now - failure.at)} ago"
    cause = f"  {printable(failure.cause or 'unknown')}{f': {told}' if told else ''}{when}"
    return [cause, *(f"    {line}" for line in printable_lines(failure.message))]


def _list_events(facts: StatusFacts, now: float, num_events: int) -> list[str]:
    if "events" in facts.unknown:
        return ["  unknown: this user may not list events"]
    shown = []
    for event in facts.events[-num_events:]:
        seen = age(None if event.at is None else now - event.at)
        seen += f" (x{event.count})" if event.count > 1 else ""
        shown.append(("", seen, event.type, event.reason, event.object, event.message))
    head = ("", "AGE", "TYPE", "REASON", "OBJECT", "MESSAGE")
    return table(head, shown) if shown else []


def _head(run: Run, now: float, *, is_unicode: bool) -> list[str]:
    phase = "Deleting" if run.is_deleting else run.phase
    if run.reason and run.reason != phase:
        phase += f" ({run.reason})"
    progress = "" if run.step is None else f"step {run.step:,}"
    if run.step is not None and run.total_steps:
        share = run.step / run.total_steps
        done = f"{run.step:,}/{run.total_steps:,}"
        progress = f"{bar(share, is_unicode=is_unicode)}  {done}  {int(100 * share)}%"
    values = (
        ("loss", run.loss),
        ("tokens/s", run.tokens_per_second),
        ("ETA", "" if run.is_over else run.eta),
    )
    # Show the age of the numbers: the operator writes them at most every 10 s, and they stay if a run hangs.
    speed = [f"{label} {value}" for label, value in values if value]
    if run.updated is not None and speed and not run.is_over:
        speed.append(f"{age(now - run.updated)} ago")
    ages = age(None if run.created is None else now - run.created)
    if run.started is not None and run.completed is not None:
        ages += f"; ended {age(now - run.completed)} ago, after {age(run.completed - run.started)}"
    facts = [
        ("Name", run.name),
        ("Namespace", run.namespace),
        ("Managed by", run.managed_by),
        ("Phase", phase),
        ("Message", run.message),
    ]
    facts += [
        ("Data", _describe_preparation(run, is_unicode=is_unicode)),
        ("Progress", progress),
        ("", "  ".join(speed)),
        ("Nodes", run.nodes),
    ]
    if run.checkpoint_step is not None:
        ago = "" if run.checkpoint_at is None else f", {age(now - run.checkpoint_at)} ago"
        facts.append(("Checkpoint", f"step {run.checkpoint_step}{ago}"))
    facts.append(("Evaluation", _describe_evaluation(run)))
    by_cause = ", ".join(
        f"{count} {cause}" for cause, count in sorted(run.restarts_by_cause.items())
    )
    facts.append(("Restarts", f"{run.restarts}{f' ({by_cause})' if by_cause else ''}"))
    facts += [
        ("Usage", _describe_usage(run)),
        ("Storage", f"claim {run.claim}, folder {run.folder}"),
        ("Image", run.image),
        ("Profile", run.profile),
        ("Age", ages),
    ]
    # Leave out lines without a value, which would look like errors: the operator fills them in while the run
    # trains.
    return [
        f"{f'{label}:' if label else '':<12}{printable(text)}"
        for label, text in facts
        if text
    ]


def _describe_preparation(run: Run, *, is_unicode: bool) -> str:
    """Describe the progress of the data's preparation. Empty after the first step, and if no pod prepares the
    data."""
    found = run.preparation
    if run.step is not None or not found:
        return ""
    work, source = (str(found.get(key) or "") for key in ("work", "source"))
    parts = [f"{work} {source}".strip()]
    percent = parse_short_count(found.get("percent"))
    if percent is not None:
        parts.append(f"{bar(percent / 100, is_unicode=is_unicode)}  {int(percent)}%")
    for noun in ("documents", "tokens"):
        number = parse_short_count(found.get(noun))
        if number:
            parts.append(f"{short_count(number)} {noun}")
    return "  ".join(parts)


def _describe_usage(run: Run) -> str:
    """Describe the time of pods and accelerators, and its price. Empty if the operator has not reported it
    yet."""
    found = {key: str(value) for key, value in run.usage.items()}
    units = (("podHours", " pod-hours"), ("gpuHours", " GPU-hours"), ("waste", " waste"))
    parts = [f"{found[key]}{unit}" for key, unit in units if key in found]
    if "cost" in found:
        parts.append(found["cost"])
    return ", ".join(parts)


def _describe_evaluation(run: Run) -> str:
    """Describe the newest results of evaluation pods, and the checkpoints that wait. Empty if the run has no
    such pods."""
    found = run.evaluation
    if not found:
        return ""
    parts = [str(found.get("state") or "")]
    if found.get("step") is not None:
        parts.append(f"step {found['step']}")
    # Another version of the operator may have written the status. Leave out parts of a different form.
    results = found.get("results")
    for one in results if isinstance(results, list) else ():
        values = one.get("values") if isinstance(one, Mapping) else None
        loss = (
            parse_short_count(values.get("loss")) if isinstance(values, Mapping) else None
        )
        if loss is not None:
            parts.append(f"{one.get('name')} {loss:.4f}")
    parts.append(f"{found.get('waiting') or 0} waiting")
    if found.get("state") in ("Waiting", "Failed"):
        parts.append(str(found.get("message") or ""))
    return "  ".join(part for part in parts if part)


def _pods(facts: StatusFacts, now: float) -> list[str]:
    if "pods" in facts.unknown:
        return ["  unknown: this user may not list pods"]
    # Bound the list: a run of a thousand nodes would fill the screen. JSON has all pods.
    newest = newest_of_each(facts.pods)
    shown = newest[:_LONGEST_POD_LIST]
    rows = []
    for pod in shown:
        place = pod.role if pod.index is None else str(pod.index)
        seen = age(None if pod.created is None else now - pod.created)
        rows.append(
            (
                "",
                place,
                pod.name,
                pod.phase,
                pod.node or NOTHING,
                str(pod.attempt),
                seen,
                pod.message,
            )
        )
    lines = (
        table(("", "INDEX", "POD", "STATUS", "NODE", "ATTEMPT", "AGE", "MESSAGE"), rows)
        if rows
        else []
    )
    # Count the pods beyond the bound, and print the command that lists them.
    left_out = len(newest) - len(shown)
    command = f"kubectl get pods -l {LABEL_RUN}={facts.run.name}{facts.place}"
    return [*lines, f"   and {left_out} more: {command}"] if left_out else lines

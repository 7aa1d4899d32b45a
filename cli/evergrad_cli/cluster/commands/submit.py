"""``evergrad submit``: checks a TrainingRun file here, then applies it to the cluster by server-side
apply."""

import argparse
import dataclasses
import time
from typing import Any, Final

from evergrad_cli.cluster.client.api_client import (
    APPLY,
    FIELD_MANAGER,
    Cluster,
    connect,
    find,
    runs_path,
)
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    add_timeout,
    given_place,
    note,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import RefusedError
from evergrad_cli.cluster.commands.placement import placement_problems, placement_warnings
from evergrad_cli.cluster.commands.waiting import (
    Goal,
    WaitOutcome,
    describe_change,
    wait_for,
)
from evergrad_cli.cluster.render.runs import Run, parse_run
from evergrad_common.contract import ExitCode
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.files.task_files import collect_task
from evergrad_manifest.model.view import without_nulls
from evergrad_manifest.reading.loader import (
    LoadedManifest,
    add_manifest_arguments,
    load_from,
)
from evergrad_manifest.values.numbers import with_whole_numbers

NAME = "submit"
EXAMPLES = """\
  evergrad submit trainingrun.yaml
  evergrad submit trainingrun.yaml --dry-run   # check here and on the cluster, create nothing
  evergrad submit trainingrun.yaml --watch     # print each change until the run has ended
  evergrad submit trainingrun.yaml --set metadata.name=docs-lm-2 --set spec.nodes.max=8
  evergrad submit trainingrun.yaml --wait --timeout 2h && evergrad status docs-lm

exit codes: 0 submitted; with --wait or --watch complete · 64 invalid file, refused by the cluster, or the run
failed because of its configuration or data, or waits for you (condition Stalled for 30 s) · 70 the run failed
in another way, or the cluster does not answer · 124 the timeout is over"""
_WATCH_SECONDS: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_manifest_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="let the cluster check the file, and create nothing",
    )
    parser.add_argument(
        "--force-conflicts",
        action="store_true",
        help="take over fields that another client has set",
    )
    waits = parser.add_mutually_exclusive_group()
    waits.add_argument(
        "--wait", action="store_true", help="wait until the run is complete or has failed"
    )
    waits.add_argument(
        "--watch", action="store_true", help="like --wait, and print every change"
    )
    add_timeout(parser, default="0")
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Submit the file. Return 0, 64 or 70; with ``--wait``, the exit code of the run, or 124."""
    loaded = _read_file(args)
    args.namespace = loaded.run.metadata.namespace or args.namespace
    name, place = loaded.run.metadata.name, given_place(args)
    with connect(args) as cluster:
        result, run = submit(
            cluster, loaded, is_dry=args.dry_run, is_forced=args.force_conflicts
        )
        text = f"trainingrun/{name} {result}{' (dry run of the cluster)' if args.dry_run else ''}"
        if not args.json:
            say(text)
            _suggest_next(run, place, is_new=result == "created")

        # With ``--wait``, return the outcome of the run. A dry run has no outcome.
        code = int(ExitCode.DONE)
        if (args.wait or args.watch) and not args.dry_run:
            outcome = _wait(cluster, name, args)
            code, text = int(outcome.exit_code or 0), f"trainingrun/{name} {outcome.text}"
            if not args.json:
                (say if code == 0 else note)(text)
    if args.json:
        facts = {
            "name": name,
            "namespace": run.namespace,
            "result": result,
            "dryRun": args.dry_run,
        }
        say_json({**facts, "generation": run.generation, "exitCode": code, "message": text})
    return code


def _suggest_next(run: Run, place: str, *, is_new: bool) -> None:
    """Print the action that the apply alone does not cause: an apply succeeds in every state of the run."""
    name = run.name
    if run.is_true("Complete"):
        note(
            "It is complete already and never trains again. See it: "
            f"evergrad status {name}{place}"
        )
    elif run.has_failed:
        note(
            f"It has failed. See why: evergrad status {name}{place}; try again: "
            f"evergrad restart {name}{place}"
        )
    elif run.wants_suspension:
        note(f"It is suspended. To let it train: evergrad resume {name}{place}")
    elif is_new:
        note(f"Follow it: evergrad logs {name} -f{place}")


def _wait(cluster: Cluster, name: str, args: argparse.Namespace) -> WaitOutcome:
    """Wait until the run is complete or cannot be, and print its changes with ``--watch``."""
    teller = ChangeTeller()
    is_told = args.watch and not args.json
    outcome, _ = wait_for(
        cluster,
        name,
        Goal.COMPLETE,
        timeout=args.timeout,
        on_change=teller.tell if is_told else lambda run: None,
    )
    return outcome


def _read_file(args: argparse.Namespace) -> LoadedManifest:
    """Return the checked manifest, with the files of the user's own task. Raises ConfigurationError."""
    loaded = load_from(args)
    # A pod does not have the manifest's folder, so the manifest carries the task's files.
    if loaded.run.spec.training is not None and (
        files := collect_task(loaded.run.training, loaded.base_directory)
    ):
        spec = {
            **loaded.raw["spec"],
            "training": {**loaded.raw["spec"]["training"], "files": files},
        }
        loaded = dataclasses.replace(loaded, raw={**loaded.raw, "spec": spec})

    # If the file's namespace and --namespace differ, refuse: it is not clear which one the user means.
    given = loaded.run.metadata.namespace
    if given is not None and args.namespace not in (None, given):
        what = f"{args.namespace} is not the namespace of the file"
        raise ConfigurationError(
            Problem("--namespace", what, f"the file has {given}", "Leave one out")
        )

    # Refuse paths that cannot exist in a pod before anything is sent. Otherwise the pod would fail later.
    raise_if(placement_problems(loaded.run), ConfigurationError)
    for warning in placement_warnings(loaded.run):
        note(f"warning: {warning}")
    return loaded


def submit(
    cluster: Cluster,
    loaded: LoadedManifest,
    *,
    is_dry: bool = False,
    is_forced: bool = False,
) -> tuple[str, Run]:
    """Apply the manifest as it was written, and return ``created``, ``configured`` or ``unchanged``, and the
    run.

    Raises RefusedError with every field that the cluster refuses.
    """
    name = loaded.run.metadata.name
    body: dict[str, Any] = with_whole_numbers(without_nulls(loaded.raw, TrainingRun))
    body["metadata"] = {**body["metadata"], "namespace": cluster.namespace}
    path, what = runs_path(cluster.namespace, name), f"trainingrun {name}"

    # Read the run first, because the answer to an apply does not contain whether it changed anything.
    before = find(cluster, path, what=what)
    query = {
        "fieldManager": FIELD_MANAGER,
        "fieldValidation": "Strict",
        **({"dryRun": "All"} if is_dry else {}),
    }
    try:
        after = _apply(cluster, path, body, what, query, is_forced=is_forced)
    except RefusedError as error:
        if error.managers != {FIELD_MANAGER}:
            raise
        # The other writer is this program: suspend, resume and restart patch single fields, which counts as
        # another kind of write. The file is newer, so it takes precedence.
        after = _apply(cluster, path, body, what, query, is_forced=True)
    if before is None:
        return "created", parse_run(after)
    is_same = _without_bookkeeping(before) == _without_bookkeeping(after)
    return "unchanged" if is_same else "configured", parse_run(after)


def _apply(
    cluster: Cluster,
    path: str,
    body: dict[str, Any],
    what: str,
    query: dict[str, str],
    *,
    is_forced: bool,
) -> dict[str, Any]:
    query = {**query, "force": "true" if is_forced else "false"}
    return cluster.send("PATCH", path, body, what=what, content_type=APPLY, query=query)[1]


def _without_bookkeeping(raw: dict[str, Any]) -> dict[str, Any]:
    metadata = raw.get("metadata") or {}
    # resourceVersion, managedFields and the status change with every write, even if the file is the same.
    return {
        "spec": raw.get("spec"),
        "labels": metadata.get("labels"),
        "annotations": metadata.get("annotations"),
    }


class ChangeTeller:
    """Prints changes of a run: a new phase or reason immediately, progress every ten seconds."""

    def __init__(self) -> None:
        self._last: tuple[str, str, str] | None = None
        self._step: int | None = None
        self._said = 0.0

    def tell(self, run: Run) -> None:
        """Print a line about ``run`` if a line is due."""
        state = (run.phase, run.reason, run.nodes)
        is_due = run.step != self._step and time.monotonic() - self._said >= _WATCH_SECONDS
        if state == self._last and not is_due:
            return
        self._last, self._step, self._said = state, run.step, time.monotonic()
        say(f"{time.strftime('%H:%M:%S')}  {describe_change(run)}")

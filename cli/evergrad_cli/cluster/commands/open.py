"""``evergrad open``: opens the live page of a run in a browser, on a cluster through a forwarded port."""

import argparse
import base64
import contextlib
import errno
import html
import http.client
import json
import os
import signal
import socket
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from evergrad_cli.cluster.client.api_client import Cluster, connect, core_path
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    is_run_directory,
    note,
    require_run_name,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import ClusterInputError
from evergrad_cli.cluster.client.forwarding import forwarded
from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.commands.local_status import require_events
from evergrad_cli.cluster.commands.waiting import read_run
from evergrad_cli.cluster.render.runs import (
    COORDINATOR,
    LABEL_ATTEMPT,
    LABEL_ROLE,
    LABEL_RUN,
)
from evergrad_cli.local.run_page import serving_files
from evergrad_common.contract import INSTANCE_HEADER, ExitCode, RunFile
from evergrad_manifest.errors import Problem

NAME = "open"
_LONGEST_SLEEP_SECONDS: Final = 0.5
EXAMPLES = """\
  evergrad open docs-lm                     # forward a port of this machine, until Ctrl-C
  evergrad open docs-lm -n team-a --port 8080 --no-browser
  evergrad open runs/docs-lm                # a run on this machine, while it trains or later"""
_TOKEN_VOLUME: Final = "evergrad-token"
_ANSWER_SECONDS: Final = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        help="name of a run on the cluster, or run directory of a run on this machine",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of this machine (default: any free port)",
    )
    parser.add_argument(
        "--no-browser",
        action="store_true",
        help="print the address of the page, and do not open it",
    )
    add_cluster_arguments(parser, json_help="print the page's address as one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Return 0 after Ctrl-C, or immediately if a local coordinator serves the page.

    Errors end the command with 64 (wrong input) or 70.
    """
    if not 0 <= args.port <= 65535:
        raise ClusterInputError(
            Problem(
                "--port",
                f"{args.port} is not within 0 and 65535",
                "",
                "Choose another port",
            )
        )
    if is_run_directory(args.name):
        return open_local(args, Path(args.name))
    args.name = require_run_name(args.name)
    with connect(args) as cluster:
        return _serve(cluster, args)


def _serve(cluster: Cluster, args: argparse.Namespace) -> int:
    """Forward a port to the run's coordinator until Ctrl-C."""
    run = read_run(cluster, args.name)
    pod = _find_coordinator(cluster, args.name, phase=run.phase)
    # Read the Secret that the pod mounts: another run with the same name has a different Secret.
    volume = next(one for one in pod["spec"]["volumes"] if one["name"] == _TOKEN_VOLUME)
    name = volume["secret"]["secretName"]
    secret = cluster.get(
        core_path("secrets", cluster.namespace, name), what=f"secret {name}"
    )
    encoded = next(iter(secret["data"].values()))
    token = base64.b64decode(encoded).decode("ascii").strip()

    # Look the pod up for each connection, so that the page works again after the coordinator is replaced.
    def connect_again() -> socket.socket:
        newest = _find_coordinator(cluster, args.name, phase=run.phase)
        ports = [
            one for part in newest["spec"]["containers"] for one in part.get("ports") or ()
        ]
        port = next(one["containerPort"] for one in ports if one.get("name") == "status")
        return cluster.connect_to_pod(newest["metadata"]["name"], port)

    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(
                forwarded(
                    connect_again,
                    port=args.port,
                    report=lambda error: note(f"warning: {error}"),
                )
            )
        except OSError as error:
            raise build_port_error(args.port, error) from error
        # The token is behind a #, which browsers do not send, and in a private file, because every user of
        # the machine can see the arguments of a command.
        address = f"http://127.0.0.1:{port}/"
        file = stack.enter_context(private_file(f"{address}#token={quote(token, safe='')}"))
        _show(args, address, file=file)
        note("Press Ctrl-C to end it.")
        with contextlib.suppress(KeyboardInterrupt):
            wait_for_interrupt()
    return int(ExitCode.DONE)


def wait_for_interrupt() -> None:
    """Wait until Ctrl-C raises KeyboardInterrupt; never returns."""
    # Waiting for a lock, such as an Event's, can turn an interrupt into another error. An interrupt just
    # before a sleep begins is handled after the sleep, so the sleep is short.
    while True:
        time.sleep(_LONGEST_SLEEP_SECONDS)


def _show(args: argparse.Namespace, address: str, *, file: Path | None = None) -> None:
    """Print the address of the page, and open it unless ``--no-browser`` is set."""
    target = address if file is None else file.as_uri()
    if args.json:
        say_json({"address": address, "open": target})
    else:
        # Without the file, the page asks for the token.
        with_token = "" if file is None else f", with its token {target}"
        say(f"page {address}{with_token}")
    if not args.no_browser and not webbrowser.open(target):
        note("cannot start a browser here; open the address in your browser")


@contextlib.contextmanager
def private_file(address: str) -> Iterator[Path]:
    """Yield a file that redirects a browser to ``address``; only its owner can read it.

    SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does, so that the file with the secret
    is deleted.
    """
    with (
        interrupting_signals(),
        tempfile.TemporaryDirectory(prefix="evergrad-") as folder,
    ):
        file = Path(folder) / "open.html"
        file.touch(mode=0o600)
        quoted = html.escape(address)
        file.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={quoted}">'
            f'<a href="{quoted}">open the page</a>\n',
            "utf-8",
        )
        yield file


@contextlib.contextmanager
def interrupting_signals() -> Iterator[None]:
    """Make signals that would end this process immediately raise KeyboardInterrupt."""
    # Ignored signals stay ignored, for example under nohup.
    ours = [
        one
        for one in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(one) is signal.SIG_DFL
    ]
    for one in ours:
        signal.signal(one, signal.default_int_handler)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


def _find_coordinator(cluster: Cluster, name: str, *, phase: str) -> Mapping[str, Any]:
    """Return the newest running pod of the run's coordinator. Raises ClusterInputError if there is none."""
    # Skip pods that are being deleted: they may still run, but not long enough to show a page.
    query = {"labelSelector": f"{LABEL_RUN}={name},{LABEL_ROLE}={COORDINATOR}"}
    pods = [
        pod
        for pod in cluster.items(
            core_path("pods", cluster.namespace), what="pods", query=query
        )
        if part(pod, "status").get("phase") == "Running"
        and pod["metadata"].get("deletionTimestamp") is None
    ]
    if not pods:
        raise ClusterInputError(
            Problem(
                f"trainingrun {name}",
                "has no running coordinator, so there is no live page",
                f"it is {phase}",
                "The page exists only while the run has pods; its report is on its volume",
            )
        )
    return max(pods, key=lambda pod: int(pod["metadata"]["labels"].get(LABEL_ATTEMPT) or 0))


def open_local(args: argparse.Namespace, directory: Path) -> int:
    """Open the page of a run on this machine, from its coordinator or else from its files."""
    if (port := find_local_port(directory)) is not None:
        _show(args, f"http://127.0.0.1:{port}/")
        return int(ExitCode.DONE)
    require_events(directory)
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(serving_files(directory, port=args.port))
        except OSError as error:
            raise build_port_error(args.port, error) from error
        _show(args, f"http://127.0.0.1:{port}/")
        note(
            "The page shows the run's files and follows them as they grow. Press Ctrl-C to end it."
        )
        with contextlib.suppress(KeyboardInterrupt):
            wait_for_interrupt()
    return int(ExitCode.DONE)


def build_port_error(port: int, error: OSError) -> ClusterInputError:
    """Return the error for a local port that cannot be used."""
    reasons = {
        errno.EADDRINUSE: "another process listens on it",
        errno.EACCES: "ports below 1024 need the rights of root",
    }
    why = reasons.get(error.errno or 0, os.strerror(error.errno or 0).lower())
    remedy = "Choose another port, or leave --port out for any free one"
    return ClusterInputError(Problem("--port", f"{port} cannot be used", why, remedy))


def find_local_port(directory: Path) -> int | None:
    """Return the port of the page of the run's local coordinator; None if the coordinator does not answer."""
    file = directory / RunFile.COORDINATOR_ADDRESS
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, http.client.HTTPException
    ):
        address = json.loads(file.read_text("utf-8"))
        port, instance = int(address["statusPort"]), address.get("instance")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            # A killed coordinator leaves its file, and another run's coordinator may now use the port.
            # Coordinators of older versions have no instance.
            is_ours = answer.headers.get(INSTANCE_HEADER) == instance
            # An unhealthy coordinator answers 503, but still serves its page.
            is_answered = answer.status in (
                http.client.OK,
                http.client.SERVICE_UNAVAILABLE,
            )
            if is_answered and is_ours:
                return port
    return None

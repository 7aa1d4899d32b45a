"""``python -m evergrad_coordinator``: arguments, wiring, exit code."""

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from evergrad_common.addresses import ANY
from evergrad_common.contract import ExitCode
from evergrad_common.secret import obtain_token
from evergrad_coordinator.edge.http import StatusServer
from evergrad_coordinator.edge.journal import (
    FileStore,
    GenerationStore,
    JournalError,
    MemoryStore,
)
from evergrad_coordinator.edge.live_feed import LiveFeed
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.protocol import MAX_GENERATION
from evergrad_coordinator.rules.budget import MAX_FAILURES
from evergrad_coordinator.rules.group import new_group
from evergrad_coordinator.rules.state import GroupSettings

_TIMES = {
    "start_wait": "to wait for --expect nodes at the start",
    "debounce": "within which events are one change; a lost member waits for 5 ms of it",
    "silence": "after which a silent node is lost",
    "lease": "from the last contact of workers until they stop",
    "ready_limit": "for a node to leave its group",
    "soft_limit": "for a group to reach a step boundary",
    "up_limit": "for a group to start; counted again whenever a member has received more of the state",
    "longest_hold": "that a join waits for a checkpoint",
    "save_patience": "that a join waits for a running save",
}


def log_line(event: str, **fields: object) -> None:
    """Write one JSON object to stderr."""
    print(
        json.dumps({"time": round(time.time(), 3), "event": event, **fields}),
        file=sys.stderr,
        flush=True,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Raises SystemExit(64) if argparse refuses them."""
    parser = argparse.ArgumentParser(
        prog="python -m evergrad_coordinator",
        description="Coordinator of one run: decides which nodes train together, and serves the run's state.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run", required=True, help="name of the run; nodes of another run are refused"
    )
    parser.add_argument(
        "--min", type=int, required=True, help="minimum number of nodes that train"
    )
    parser.add_argument(
        "--max",
        type=int,
        required=True,
        help="maximum number of nodes that train; further nodes are spares",
    )
    parser.add_argument(
        "--expect",
        type=int,
        help="number of nodes to wait for at the start (default: --max)",
    )
    parser.add_argument("--host", default=ANY, help="address to listen at (default: any)")
    parser.add_argument(
        "--port", type=int, default=0, help="port for nodes (default: any free port)"
    )
    parser.add_argument(
        "--status-port", type=int, default=0, help="port for HTTP (default: any free port)"
    )
    parser.add_argument(
        "--address-file",
        type=Path,
        help="file for ports and instance, written once both ports listen",
    )
    parser.add_argument(
        "--state",
        type=Path,
        help="file of the newest generation, which is also the lock of the run",
    )
    parser.add_argument(
        "--first-generation",
        type=int,
        default=0,
        help="newest generation that is known from another source",
    )
    parser.add_argument(
        "--epoch", type=int, default=0, help="high bits of every generation"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        required=True,
        help="file with the token of nodes and clients; created if it does not exist",
    )
    parser.add_argument(
        "--recovery",
        choices=["in-process", "fresh"],
        default="in-process",
        help="whether workers survive a change of the group, or each generation starts its own",
    )
    parser.add_argument(
        "--hold-joins",
        action="store_true",
        help="with fresh workers: a join waits for a checkpoint",
    )
    parser.add_argument(
        "--exit-when-empty",
        action="store_true",
        help="exit with 75 or 76 when all nodes have left",
    )
    parser.add_argument(
        "--nothing-runs",
        action="store_true",
        help="do not wait for a group of an earlier coordinator",
    )
    _add_bounds(parser)

    # argparse would exit with 2, which is not one of our exit codes.
    try:
        return parser.parse_args(arguments)
    except SystemExit as stop:
        raise SystemExit(ExitCode.USER_ERROR if stop.code else 0) from None


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for limits of failures, members and times, with the defaults of the rules."""
    most = GroupSettings.max_failures_without_progress
    parser.add_argument(
        "--max-failures",
        type=int,
        default=most,
        help=f"failures that are allowed without progress ({most})",
    )
    parser.add_argument(
        "--max-members",
        type=int,
        default=GroupSettings.max_members,
        help=f"nodes that can be connected, including spares ({GroupSettings.max_members})",
    )
    parser.add_argument(
        "--linger",
        type=float,
        default=3.0,
        help="seconds to wait for late joiners after the end (3)",
    )
    for name, text in _TIMES.items():
        default = getattr(GroupSettings, f"{name}_seconds")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{text} ({default:g})",
        )


def find_problems(options: argparse.Namespace) -> list[str]:
    """Return a description of every problem of the arguments, so that the user can fix them together."""
    problems = []
    if options.min < 1:
        problems.append(f"--min: {options.min} is below 1. Give at least 1.")
    if options.max < options.min:
        problems.append(
            f"--max: {options.max} is below --min {options.min}. Raise --max to at least "
            f"{options.min}, or lower --min."
        )
    if options.expect is not None and not options.min <= options.expect <= max(
        options.min, options.max
    ):
        problems.append(
            f"--expect: {options.expect} is not within --min {options.min} and --max {options.max}."
        )
    if options.max > options.max_members:
        problems.append(
            f"--max: {options.max} is above --max-members {options.max_members}. Raise "
            "--max-members, or lower --max."
        )

    # 0 is valid for a wait that may be skipped. Any other limit would be exceeded immediately.
    problems += [
        f"--{name.replace('_', '-')}: {getattr(options, name)} is not above 0. Give seconds."
        for name in (*_TIMES, "linger")
        if not 0 <= getattr(options, name) < 1e9
        or (
            getattr(options, name) == 0 and name not in ("linger", "debounce", "start_wait")
        )
    ]

    # Epoch and generation share one number below MAX_GENERATION. The epoch has the bits from bit 32 on.
    for name, most in (
        ("first_generation", MAX_GENERATION),
        ("epoch", 2**19),
        ("max_failures", MAX_FAILURES),
        ("port", 65535),
        ("status_port", 65535),
    ):
        if not 0 <= getattr(options, name) <= most:
            problems.append(
                f"--{name.replace('_', '-')}: {getattr(options, name)} is not within 0 and {most}."
            )

    # Workers that survive a change lose no step by a join, so there is no reason to hold the join.
    if options.hold_joins and options.recovery != "fresh":
        problems.append(
            "--hold-joins: only fresh workers have joins to hold. Add --recovery fresh, or leave it out."
        )
    return problems


def build_settings(options: argparse.Namespace, token: str) -> GroupSettings:
    """Build the settings of the rules from the arguments."""
    return GroupSettings(
        run=options.run,
        min_nodes=options.min,
        max_nodes=options.max,
        expect=options.expect or options.max,
        recovery=options.recovery,
        token=token,
        hold_joins=options.hold_joins,
        max_failures_without_progress=options.max_failures,
        epoch=options.epoch,
        exit_when_empty=options.exit_when_empty,
        nothing_runs=options.nothing_runs,
        max_members=options.max_members,
        **{f"{name}_seconds": getattr(options, name) for name in _TIMES},
    )


async def serve(
    options: argparse.Namespace,
    settings: GroupSettings,
    store: GenerationStore,
    generation: int,
) -> int:
    """Serve until the run has ended and its nodes have received the end, or until SIGTERM.

    Returns the exit code.
    """
    # A change of a thousand nodes creates many short-lived objects without cycles, so run the cycle collector
    # less frequently.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)

    feed = LiveFeed(log_line)
    # The time limits start now. Use the same clock as the events.
    server = Server(
        new_group(settings, generation=generation, now=time.monotonic()),
        store,
        log=feed.log,
    )
    status = StatusServer(server, feed)
    loop = asyncio.get_running_loop()
    over, stopped = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        stopped.set()
        over.set()

    # Install the handlers before a node can connect. An earlier signal ends the process immediately.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    # Write the address file after both ports are open, because its reader connects immediately.
    try:
        port = await server.listen(options.host, options.port)
        status_port = await status.listen(options.host, options.status_port)
        if options.address_file:
            address = {"port": port, "statusPort": status_port, "instance": status.instance}
            write_address(options.address_file, address)
    except OSError as error:
        what = f"{options.host or 'any address'}: cannot listen, or cannot write its address; {error}."
        log_line("failed", message=f"{what} Choose other ports or another --address-file.")
        return ExitCode.USER_ERROR
    log_line(
        "listening",
        run=settings.run,
        port=port,
        statusPort=status_port,
        generation=generation,
    )

    # The process does not end with the run, because late nodes still have to receive the end of the run.
    server.finished.add_done_callback(lambda _: over.set())
    await over.wait()
    if server.finished.done():
        code = server.finished.result()
        # If this coordinator is superseded, the other coordinator announces the end.
        if not server.effects.is_superseded:
            await linger(server, options.linger, stopped)
    else:
        # Send nothing to the nodes: they continue to train for a lease and wait for the next coordinator.
        code = ExitCode.STOPPED_SAVED
    status.close()
    await server.close()
    log_line("exit", exitCode=int(code))
    return int(code)


async def linger(server: Server, seconds: float, stopped: asyncio.Event) -> None:
    """Wait ``seconds``, and up to 5 s more while nodes are still connected."""
    until = time.monotonic() + seconds
    at_most = until + 5
    while not stopped.is_set() and time.monotonic() < (
        at_most if server.num_connections else until
    ):
        await asyncio.sleep(0.02)


def write_address(path: Path, address: Mapping[str, object]) -> None:
    """Write the file atomically, so that a reader finds either no file or a complete file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(address) + "\n", encoding="ascii")
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parse_arguments(arguments)
    problems = find_problems(options)
    try:
        token = "" if problems else obtain_token(options.token_file)
    except (OSError, ValueError) as error:
        problems.append(
            f"--token-file: {options.token_file} cannot be read or created; {error}. Give a text "
            "file with the token."
        )
    if problems:
        for problem in problems:
            log_line("failed", message=problem)
        return ExitCode.USER_ERROR

    # Take the lock of the run before any action that other processes can observe.
    try:
        store: GenerationStore = (
            FileStore(options.state) if options.state else MemoryStore()
        )
        generation = prepare_generation(store, options.first_generation)
    except (JournalError, OSError) as error:
        log_line("failed", message=str(error))
        return ExitCode.INTERNAL
    # Release the lock last: the next coordinator must not start while this one can still send.
    try:
        return asyncio.run(
            serve(options, build_settings(options, token), store, generation)
        )
    finally:
        store.close()


def prepare_generation(store: GenerationStore, first: int) -> int:
    """Raise the stored number to at least ``first``, and return the newest number.

    Raises JournalError if another coordinator has changed the number at the same time.
    """
    known = store.load()
    # Never lower the number: the store may have a newer number than ``--first-generation``.
    if first > known and not store.advance(known, first):
        raise JournalError(
            "another coordinator advanced the generation at the same moment. Only one may run."
        )
    return max(known, first)


if __name__ == "__main__":
    sys.exit(main())

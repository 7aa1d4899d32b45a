"""Follows the output of a run's pods: one thread for each pod prints whole lines, including the pods of new
attempts."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from evergrad_cli.cluster.client.api_client import Cluster, core_path
from evergrad_cli.cluster.client.errors import NotFoundError, RefusedError, UnreachableError
from evergrad_cli.cluster.commands.waiting import (
    StallWatch,
    WaitLimits,
    WaitOutcome,
    read_run,
)
from evergrad_cli.cluster.render.runs import (
    COORDINATOR,
    LABEL_RUN,
    NODE,
    Pod,
    Run,
    newest_of_each,
    parse_pods,
)

_POLL_SECONDS: Final = 1.0
_AFTER_THE_END_SECONDS: Final = 10.0
"""Time for the last lines after the end of the run, because a stream may stay open as long as its pod
exists."""
_GONE_SECONDS: Final = 10.0
"""Time that a node may be away. If the command followed another node sooner, it would switch back and
forth."""
_RETRY_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 15.0
"""Longest pause between two tries. An outage may last for hours, and a node may never answer again, so the
pauses grow."""
_MANY_FAILURES: Final = 10
"""Failures in a row without a new line, about a minute, after which a reader prints a remark."""
_SILENCE_SECONDS: Final = 3600.0
"""Silence after which a stream is opened again. No lines are lost."""


@dataclass(frozen=True)
class Selection:
    """The pods whose output is shown: node ``index``, the lowest existing node (None), all nodes, or the
    coordinator."""

    index: int | None = None
    is_all: bool = False
    is_coordinator: bool = False

    def is_wanted(self, pod: Pod) -> bool:
        """Return whether the output of the pod may be shown."""
        if self.is_coordinator or pod.role == COORDINATOR:
            return self.is_coordinator and pod.role == COORDINATOR
        return self.index is None or pod.index == self.index


def choose(
    pods: Sequence[Pod], selection: Selection, *, is_previous: bool = False
) -> list[Pod]:
    """Return the pods whose output is shown once: the newest attempt of each node, or with ``is_previous``
    the attempt before it."""
    wanted = [pod for pod in pods if selection.is_wanted(pod)]
    if is_previous:
        newest = {pod.name for pod in newest_of_each(wanted)}
        wanted = [
            pod for pod in wanted if pod.name not in newest or pod.is_over or pod.restarts
        ]
        # If the newest pod of a node has ended and is not replaced yet, that pod is the failed attempt.
        older = [pod for pod in wanted if pod.name not in newest]
        covered = {(pod.role, pod.index) for pod in older}
        wanted = older + [
            pod
            for pod in wanted
            if pod.name in newest and (pod.role, pod.index) not in covered
        ]
    # Pods that prepare the data are shown only until nodes exist.
    found = sorted(
        newest_of_each(wanted), key=lambda pod: (pod.role != NODE, pod.index or 0)
    )
    if selection.is_all or selection.is_coordinator or selection.index is not None:
        return found
    started = [pod for pod in found if pod.has_started]
    return (started or found)[:1]


def list_pods(cluster: Cluster, name: str) -> list[Pod]:
    """Return the run's pods. Raises RefusedError if the user may not list them."""
    path, query = (
        core_path("pods", cluster.namespace),
        {"labelSelector": f"{LABEL_RUN}={name}"},
    )
    return parse_pods(cluster.items(path, what="pods", query=query))


@dataclass(frozen=True)
class Line:
    """One line of a pod's output. ``time`` is the container runtime's text (RFC 3339)."""

    pod: Pod
    time: str
    text: str


def split_line(pod: Pod, raw: bytes) -> Line:
    """Split a line into the time that the kubelet puts before it, and the text."""
    text = raw.decode("utf-8", "replace")
    head, space, rest = text.partition(" ")
    # The kubelet's own remarks have no time, for example a remark about a lost log file.
    return (
        Line(pod, head, rest)
        if space and head[:1].isdigit() and "T" in head
        else Line(pod, "", text)
    )


def order_of(stamp: str) -> str:
    """Return a time that can be compared as text: the kubelet drops zeros at the end of a fraction."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def show_line(line: Line, *, prefix: bool, with_time: bool, as_json: bool) -> str:
    """Return the line as it is printed.

    The prefix names the node, as its supervisor does, and the attempt if it is not the first.
    """
    pod = line.pod
    if as_json:
        facts = {
            "node": pod.index,
            "role": pod.role,
            "attempt": pod.attempt,
            "pod": pod.name,
            "time": line.time,
        }
        return json.dumps({**facts, "line": line.text})
    text = line.text
    if prefix:
        said = f"[{pod.role}" if pod.index is None else f"[node {pod.index}"
        attempt = f" #{pod.attempt}" if pod.attempt else ""
        # Lines of the supervisor already begin with their node.
        is_named = text.startswith((f"{said} ", f"{said}]"))
        rest = text[len(said) :] if is_named else f"] {text}"
        text = f"{said}{attempt}{rest}"
    return f"{line.time} {text}" if with_time and line.time else text


class LogReader:
    """Reads the output of pods. ``show`` receives whole lines, from one pod at a time."""

    def __init__(
        self, cluster: Cluster, show: Callable[[Line], None], *, tail: int | None
    ) -> None:
        self._cluster = cluster
        self._show = show
        self._tail = tail
        # Each pod has its own thread. Let one thread write at a time, so that their lines are not mixed.
        self._lock = threading.Lock()
        # Remember the last line of each pod, because a stream may break after any line.
        self._shown: dict[str, str] = {}

    def last_time(self, pod: Pod) -> str:
        """Return the time of the pod's last line that was shown; empty before the first line."""
        return self._shown.get(pod.name, "")

    def read(
        self,
        pod: Pod,
        *,
        is_previous: bool = False,
        is_following: bool = False,
    ) -> None:
        """Show the output until the end of the stream, without the lines that were already shown.

        Raises NotFoundError if the pod does not exist, RefusedError if it has not started, UnreachableError
        if the stream breaks.
        """
        query = {"timestamps": "true"}
        if pod.container:
            query["container"] = pod.container
        if is_previous:
            query["previous"] = "true"
        if is_following:
            query["follow"] = "true"
        since = self.last_time(pod)
        if since:
            query["sinceTime"] = since
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        path = core_path("pods", self._cluster.namespace, pod.name) + "/log"
        silence = _SILENCE_SECONDS if is_following else 60.0
        for raw in self._cluster.lines(
            path, what=f"output of pod {pod.name}", query=query, read_seconds=silence
        ):
            line = split_line(pod, raw)
            # sinceTime has whole seconds, so the stream repeats lines of that second that were already shown.
            if since and line.time and order_of(line.time) <= order_of(since):
                continue
            with self._lock:
                self._show(line)
            if line.time:
                self._shown[pod.name] = line.time


class LogFollower:
    """Follows a run until it ends: the output of its pods, and of the attempts that replace them."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        selection: Selection,
        reader: LogReader,
        *,
        remark: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._selection = selection
        self._reader = reader
        self._remark = remark
        self._threads: dict[str, threading.Thread] = {}
        self._is_over = threading.Event()
        self._until = float("inf")
        self._is_pipe_broken = threading.Event()
        self._leader: int | None = None
        self._leader_missed = 0.0
        self._remarked = ""
        self._patience = WaitLimits()
        self._has_looked = False

    def follow(self) -> WaitOutcome | None:
        """Return when the run has ended and all its output is shown, or when the run is deleted.

        If the run has no pods and waits for the user, return the outcome of the wait. Raises BrokenPipeError
        if the reader of the output has closed the pipe.
        """
        stalls = StallWatch()
        stall: WaitOutcome | None = None
        while True:
            seen = self._look()
            if seen is None:
                self._remark("The run was deleted.")
                break
            run, pods = seen
            self._start_readers(pods)
            if run.is_over:
                break
            # If the run has a pod, output may follow, even if the run waits for the user.
            stall = stalls.judge(run) if not pods else None
            if stall is not None:
                break
            message = f" ({run.message})" if run.message else ""
            waiting = "" if pods else f"No pods: the run is {run.phase}{message}. Waiting."
            if waiting and waiting != self._remarked:
                self._remarked = waiting
                self._remark(waiting)
            if self._is_pipe_broken.wait(_POLL_SECONDS):
                raise BrokenPipeError

        # Let the readers finish. A stream that stays open longer has no more lines.
        self._until = time.monotonic() + _AFTER_THE_END_SECONDS
        self._is_over.set()
        for thread in self._threads.values():
            thread.join(max(0.0, self._until - time.monotonic()))
        if self._is_pipe_broken.is_set():
            raise BrokenPipeError
        return stall

    def _look(self) -> tuple[Run, list[Pod]] | None:
        """Return the run and its pods, or None if the run was deleted. Wait during an outage."""
        while True:
            try:
                seen = (
                    read_run(self._cluster, self._name),
                    list_pods(self._cluster, self._name),
                )
            except (NotFoundError, RefusedError, UnreachableError) as error:
                # If the run or the cluster is missing at the first look, the user made a mistake. Later, it
                # is an outage.
                if not self._has_looked:
                    raise
                if self._patience.outlasts(error):
                    self._patience.after(error)
                    continue
                if not isinstance(error, NotFoundError) or error.is_kind_unknown:
                    raise
                return None
            self._patience.is_well()
            self._has_looked = True
            return seen

    def _start_readers(self, pods: list[Pod]) -> None:
        """Start a thread for each pod with output, including the attempts that replace it later."""
        wanted = [pod for pod in pods if self._selection.is_wanted(pod)]
        if self._selection == Selection():
            wanted = self._of_leader(wanted)
        for pod in wanted:
            if pod.has_started and pod.name not in self._threads:
                # A daemon thread, so that a stream that hangs does not keep the command from ending.
                thread = threading.Thread(
                    target=self._read,
                    args=(pod,),
                    name=f"output of {pod.name}",
                    daemon=True,
                )
                self._threads[pod.name] = thread
                thread.start()

    def _of_leader(self, pods: Sequence[Pod]) -> list[Pod]:
        """Return the pods of one node: the lowest existing node, even before it has started, or another node
        if that node is away for ``_GONE_SECONDS``.

        A node that was followed before is still shown, because either of the two may have rank 0.
        """
        # Nodes that have output and still exist. Rank 0, which prints the steps, is on the lowest of them.
        alive = sorted(
            {
                pod.index
                for pod in pods
                if pod.index is not None and pod.has_started and not pod.is_over
            }
        )
        if self._leader is not None and alive and alive[0] < self._leader:
            self._remark(f"Node {alive[0]} has started. Following it, too.")
            self._leader = alive[0]
        if self._leader is None or self._leader in alive or not alive:
            self._leader_missed = 0.0
            if self._leader is None:
                coming = {pod.index or 0 for pod in pods if not pod.is_over} or {
                    pod.index or 0 for pod in pods
                }
                self._leader = min(coming, default=None)
        elif not self._leader_missed:
            self._leader_missed = time.monotonic()
        elif time.monotonic() - self._leader_missed > _GONE_SECONDS:
            self._remark(f"Node {self._leader} is gone. Following node {alive[0]}.")
            self._leader, self._leader_missed = alive[0], 0.0
        return [pod for pod in pods if pod.index is None or pod.index == self._leader]

    def _read(self, pod: Pod) -> None:
        # Each stream begins after the last line that was shown. The number of streams is bounded only by the
        # end of the pod and of the run, so that the output continues after an outage of any length.
        failures, is_said = 0, False
        while time.monotonic() < self._until:
            before, why = self._reader.last_time(pod), ""
            try:
                self._reader.read(pod, is_following=True)
            except NotFoundError:
                return
            except BrokenPipeError:
                self._is_pipe_broken.set()
                return
            except (UnreachableError, RefusedError) as error:
                # The API server restarts, or the node is briefly away.
                why = str(error)
            else:
                if self._is_over.is_set() or self._has_ended(pod):
                    return
            if self._reader.last_time(pod) == before:
                failures += 1
            else:
                failures, is_said = 0, False
            if why and failures >= _MANY_FAILURES and not is_said:
                is_said = True
                self._remark(
                    f"The output of pod {pod.name} cannot be read; {why.rstrip('.')}. "
                    "Trying again."
                )
            pause = min(_LONGEST_PAUSE_SECONDS, max(1, failures) * _RETRY_SECONDS)
            if self._is_over.wait(pause):
                time.sleep(_RETRY_SECONDS)

    def _has_ended(self, pod: Pod) -> bool:
        # A stream ends with the container, but also with the API server. Only the pod shows whether more
        # output can follow. A coordinator's container may be restarted in its pod.
        if pod.role != COORDINATOR:
            with contextlib.suppress(UnreachableError, RefusedError):
                others = list_pods(self._cluster, self._name)
                return all(one.name != pod.name or one.is_over for one in others)
        return False

"""The output of a run's pods: one thread a pod reads and prints whole lines, new attempts are picked up as
they come."""

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
    newest_of_each,
    parse_pods,
)

_POLL_SECONDS: Final = 1.0
_AFTER_THE_END_SECONDS: Final = 10.0
"""Time for the last lines after the end of the run; a stream may stay open for as long as its pod."""
_GONE_SECONDS: Final = 10.0
"""A node may be away for this long: following another one at once would switch back and forth."""
_RETRY_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 15.0
"""An outage may last for hours, and a node may never answer again: a reader asks more and more rarely."""
_MANY_FAILURES: Final = 10
"""Failures in a row, without a new line, after which a reader says so: about a minute."""
_SILENCE_SECONDS: Final = 3600.0
"""Silence after which a stream is opened again; no lines are lost by that."""


@dataclass(frozen=True)
class Selection:
    """The pods whose output is shown: node ``index``, the lowest node there is (None), all nodes, or
    the coordinator."""

    index: int | None = None
    is_all: bool = False
    is_coordinator: bool = False

    def is_wanted(self, pod: Pod) -> bool:
        """Whether the pod is one of those that may be shown."""
        if self.is_coordinator or pod.role == COORDINATOR:
            return self.is_coordinator and pod.role == COORDINATOR
        return self.index is None or pod.index == self.index


def choose(
    pods: Sequence[Pod], selection: Selection, *, is_previous: bool = False
) -> list[Pod]:
    """The pods whose output is shown once: of each node its newest attempt, or with ``is_previous`` the one
    before."""
    wanted = [pod for pod in pods if selection.is_wanted(pod)]
    if is_previous:
        newest = {pod.name for pod in newest_of_each(wanted)}
        wanted = [
            pod for pod in wanted if pod.name not in newest or pod.is_over or pod.restarts
        ]
        # A node whose newest pod has ended and is not replaced yet: that pod is the attempt that failed.
        older = [pod for pod in wanted if pod.name not in newest]
        covered = {(pod.role, pod.index) for pod in older}
        wanted = older + [
            pod
            for pod in wanted
            if pod.name in newest and (pod.role, pod.index) not in covered
        ]
    # Pods that prepare the data are shown alone only until there are nodes.
    found = sorted(
        newest_of_each(wanted), key=lambda pod: (pod.role != NODE, pod.index or 0)
    )
    if selection.is_all or selection.is_coordinator or selection.index is not None:
        return found
    started = [pod for pod in found if pod.has_started]
    return (started or found)[:1]


def list_pods(cluster: Cluster, name: str) -> list[Pod]:
    """The run's pods. Raises RefusedError for a user who may not list them."""
    path, query = (
        core_path("pods", cluster.namespace),
        {"labelSelector": f"{LABEL_RUN}={name}"},
    )
    return parse_pods(cluster.items(path, what="pods", query=query))


@dataclass(frozen=True)
class Line:
    """One line of a pod's output. ``time`` as the container runtime wrote it (RFC 3339)."""

    pod: Pod
    time: str
    text: str


def split_line(pod: Pod, raw: bytes) -> Line:
    """A line with the time that the kubelet puts before it → its parts."""
    text = raw.decode("utf-8", "replace")
    head, space, rest = text.partition(" ")
    # The kubelet's own remarks, such as one about a lost log file, come without a time.
    return (
        Line(pod, head, rest)
        if space and head[:1].isdigit() and "T" in head
        else Line(pod, "", text)
    )


def order_of(stamp: str) -> str:
    """A time that compares as text: the kubelet drops zeros at the end of a fraction."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def show_line(line: Line, *, prefix: bool, with_time: bool, as_json: bool) -> str:
    """The line as it is printed.

    The prefix names the node, as its supervisor does, and the attempt once it is not the first.
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
        # Lines of the supervisor begin with its node already.
        is_named = text.startswith((f"{said} ", f"{said}]"))
        rest = text[len(said) :] if is_named else f"] {text}"
        text = f"{said}{attempt}{rest}"
    return f"{line.time} {text}" if with_time and line.time else text


class LogReader:
    """Reads pods' output; ``show`` gets whole lines, of one pod at a time."""

    def __init__(
        self, cluster: Cluster, show: Callable[[Line], None], *, tail: int | None
    ) -> None:
        self._cluster = cluster
        self._show = show
        self._tail = tail
        # One writer at a time: each pod has a thread of its own, and their lines must not be mixed.
        self._lock = threading.Lock()
        # Kept here, since a stream may break after any line.
        self._shown: dict[str, str] = {}

    def last_time(self, pod: Pod) -> str:
        """The time of the pod's last line that was shown; empty before there is one."""
        return self._shown.get(pod.name, "")

    def read(
        self,
        pod: Pod,
        *,
        is_previous: bool = False,
        is_following: bool = False,
    ) -> None:
        """Show what there is, until the end of the stream, without the lines that were shown before.

        Raises NotFoundError for a pod that is gone, RefusedError for one that is not started,
        UnreachableError for a stream that breaks.
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
            # sinceTime has whole seconds: lines of that second have been shown already.
            if since and line.time and order_of(line.time) <= order_of(since):
                continue
            with self._lock:
                self._show(line)
            if line.time:
                self._shown[pod.name] = line.time


class LogFollower:
    """Follows a run: its pods' output, the attempts that replace them, until the run ends."""

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

    def follow(self) -> WaitOutcome | None:
        """Returns when the run has ended and all its output is shown, or when it is deleted; with the
        outcome, when it has no pods and waits for a person.

        Raises BrokenPipeError once nobody reads what is printed.
        """
        patience, stalls, is_seen = WaitLimits(), StallWatch(), False
        stall: WaitOutcome | None = None
        while True:
            # A run or a cluster that is not there at first is a mistake of the user; later it is an event.
            try:
                run = read_run(self._cluster, self._name)
                pods = list_pods(self._cluster, self._name)
            except (NotFoundError, RefusedError, UnreachableError) as error:
                if not is_seen:
                    raise
                if patience.outlasts(error):
                    patience.after(error)
                    continue
                if not isinstance(error, NotFoundError) or error.is_kind_unknown:
                    raise
                self._remark("The run was deleted.")
                break
            patience.is_well()
            is_seen = True

            # A thread for each pod that has output, also for the attempts that replace it later.
            wanted = [pod for pod in pods if self._selection.is_wanted(pod)]
            if self._selection == Selection():
                wanted = self._of_leader(wanted)
            for pod in wanted:
                if pod.has_started and pod.name not in self._threads:
                    # A daemon: a stream that hangs must not keep the command from ending.
                    thread = threading.Thread(
                        target=self._read,
                        args=(pod,),
                        name=f"output of {pod.name}",
                        daemon=True,
                    )
                    self._threads[pod.name] = thread
                    thread.start()
            if run.is_over:
                break
            # With a pod there may be output to come, whatever the run waits for.
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

        # The readers come to the end of what there is. A stream that stays open after that has no more lines.
        self._until = time.monotonic() + _AFTER_THE_END_SECONDS
        self._is_over.set()
        for thread in self._threads.values():
            thread.join(max(0.0, self._until - time.monotonic()))
        if self._is_pipe_broken.is_set():
            raise BrokenPipeError
        return stall

    def _of_leader(self, pods: Sequence[Pod]) -> list[Pod]:
        """The pods of one node: the lowest there is, also before it has started, and another while that is
        away for long.

        A node that was followed before goes on being shown: either of the two may have rank 0.
        """
        # Nodes with output that are still there; rank 0, which prints the steps, is on the lowest of them.
        alive = sorted(
            {
                pod.index
                for pod in pods
                if pod.index is not None and pod.has_started and not pod.is_over
            }
        )
        if self._leader is not None and alive and alive[0] < self._leader:
            self._remark(f"Node {alive[0]} is there. Following it, too.")
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
            self._remark(f"Node {self._leader} is away. Following node {alive[0]}.")
            self._leader, self._leader_missed = alive[0], 0.0
        return [pod for pod in pods if pod.index is None or pod.index == self._leader]

    def _read(self, pod: Pod) -> None:
        # Each stream begins after the last line that was shown. There is no bound on their number but the
        # pod's end and the run's: after an outage of any length the output goes on.
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
                # The API server restarts, or the node is away for a moment.
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
        # A stream ends with the container, but also with the API server: only the pod itself shows whether
        # more can come. A coordinator's container may be started again in its pod.
        if pod.role != COORDINATOR:
            with contextlib.suppress(UnreachableError, RefusedError):
                others = list_pods(self._cluster, self._name)
                return all(one.name != pod.name or one.is_over for one in others)
        return False

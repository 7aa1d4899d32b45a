"""Watches the processes of a node's workers on its event loop: their records, output and ends."""

import asyncio
import contextlib
import os

from evergrad_common.contract import ExitCode
from evergrad_trainer.node.output import WorkerOutput
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.node.tasks import TaskWatch
from evergrad_trainer.node.worker_group import WorkerGroup
from evergrad_trainer.node.workers import Worker, end_orphans


class WorkerProcesses:
    """Watches workers from their start until they are reaped.

    The worker group receives all records of a worker before its exit code.
    """

    def __init__(self, settings: NodeSettings, tasks: TaskWatch) -> None:
        self._settings = settings
        self._tasks = tasks
        self._outputs: dict[int, WorkerOutput] = {}
        self._end_descriptors: dict[int, int] = {}
        """By serial number: a descriptor that becomes readable when the worker has ended."""
        self._pids: set[int] = set()

    def watch(self, worker: Worker, group: WorkerGroup) -> None:
        """Begin to watch a worker that ``group`` has just started."""
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.channel.socket, self._tasks.call, self._read, worker, group)
        # The descriptor becomes readable when the worker has ended. The process's sentinel is a pipe that its
        # child processes also hold open: processes that load a script's data would hide the worker's end.
        try:
            end = os.pidfd_open(worker.pid)
        except (OSError, AttributeError):
            end = os.dup(worker.process.sentinel)
        self._end_descriptors[worker.serial] = end
        loop.add_reader(end, self._tasks.call, self._reap, worker, group)
        if worker.output is not None:
            name = f"node-{self._settings.node}-worker-{worker.local_rank}.out"
            output = self._outputs[worker.serial] = WorkerOutput(
                worker.output,
                path=self._settings.run_directory / "logs" / name,
                node=self._settings.node,
                rank=lambda: worker.rank,
                is_forwarded=self._settings.forwards_output,
                on_output=worker.note_output,
            )
            worker.last_lines = lambda: "\n".join(output.last_lines)
        self._pids.add(worker.pid)

    def end_orphans(self) -> None:
        """End the processes that workers have started and left behind."""
        end_orphans(known=self._pids)

    def _read(self, worker: Worker, group: WorkerGroup) -> None:
        try:
            while (record := worker.channel.receive(0)) is not None:
                group.hear(worker, record)
        except EOFError:
            asyncio.get_running_loop().remove_reader(worker.channel.socket)

    def _reap(self, worker: Worker, group: WorkerGroup) -> None:
        # Keep this order: end the worker's descendants, read its last records and output, then report its
        # end.
        loop = asyncio.get_running_loop()
        worker.process.join()
        self._pids.discard(worker.pid)
        worker.end_descendants()
        # A process that left its process group is now a child of this process. Do not wait for the next tick:
        # this may be the last worker of a node that ends immediately.
        self.end_orphans()
        end = self._end_descriptors.pop(worker.serial)
        loop.remove_reader(end)
        os.close(end)
        with contextlib.suppress(EOFError):
            # The worker's last records may still be in the channel.
            while (record := worker.channel.receive(0)) is not None:
                group.hear(worker, record)
        loop.remove_reader(worker.channel.socket)
        worker.channel.close()
        # Read the output to its end, because the report of the worker's end contains the last lines.
        output = self._outputs.pop(worker.serial, None)
        if output is not None:
            output.drain()
            output.close()
        code = worker.process.exitcode
        group.end(worker, int(ExitCode.INTERNAL) if code is None else code)
        # Set this even if the group ignored the end: a closed process has no process id.
        worker.state = "ended"
        worker.process.close()
        worker.last_lines = None

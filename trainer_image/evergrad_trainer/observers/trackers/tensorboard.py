"""TensorBoard: event files in one folder, written by the tensorboard package.

Each process that is rank 0 writes a separate file, which begins with the first step for which it is valid.
TensorBoard then drops that step and later steps of older files, so that a step that is trained again after a
kill is shown once, with its last values.
"""

import importlib
import json
import re
import socket
import time
from typing import Any, BinaryIO, Final

from evergrad_trainer.base.durable import unique_suffix
from evergrad_trainer.observers.trackers.interface import End, Shown, TrackedRun, Values

_PREFIX: Final = "events.out.tfevents."
_FILE: Final = re.compile(rf"{re.escape(_PREFIX)}(\d+)\.")


class TensorBoard:
    """The event file of one process."""

    def __init__(self, run: TrackedRun) -> None:
        # Import here, because the libraries of trackers are optional and slow to import.
        event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")
        record_writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._event: Any = event_pb2.Event

        # Write the newest valid step again, because an evaluation of it may be missing.
        done = max(0, min(run.noted.step, run.start_step) - 1)
        self.own_id = run.run_id
        self.shown = Shown(done, {}, done if run.noted.step else -1)

        run.directory.mkdir(parents=True, exist_ok=True)
        # The file's name must sort after all others, in the order in which TensorBoard reads them, even if
        # the clocks of the hosts differ.
        names = (_FILE.match(path.name) for path in run.directory.iterdir())
        moment = max([int(time.time()), *(int(found[1]) + 1 for found in names if found)])
        host = socket.gethostname().replace("/", "-")
        name = f"{_PREFIX}{moment:010d}.{host}.{unique_suffix()}"
        self._file: BinaryIO = (run.directory / name).open("xb")
        self._writer: Any = record_writer.RecordWriter(self._file)
        self._put(file_version="brain.Event:2")
        log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # Older files contain the complete steps below this step. Evaluations before the first step are at
        # step 0.
        self._put(step=done + 1 if run.noted.step else 0, session_log=log)
        facts = json.dumps(dict(run.facts), indent=2, ensure_ascii=False)
        self.note("run", f"```\n{facts}\n```")
        for tag in run.settings.tags:
            self.note(f"tag/{tag}", tag)
        self.flush()

    def write(self, step: int, time: float, values: Values) -> None:
        event = self._event(wall_time=time, step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.write(event.SerializeToString())

    def note(self, name: str, text: str) -> None:
        event = self._event(wall_time=time.time(), step=self.shown.step)
        value = event.summary.value.add(tag=name)
        value.metadata.plugin_data.plugin_name = "text"
        # 7 is DT_STRING, TensorFlow's type of texts.
        value.tensor.dtype = 7
        value.tensor.string_val.append(text.encode("utf-8", errors="replace"))
        value.tensor.tensor_shape.dim.add(size=1)
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._writer.flush()
        self._file.flush()

    def finish(self, end: End) -> None:
        self.flush()
        self._writer.close()

    def _put(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())

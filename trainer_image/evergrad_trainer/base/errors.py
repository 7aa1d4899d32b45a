"""The tree of the trainer's errors. Each error determines the exit code of its process.

EvergradError                 internal, exit 70
├── InputError                a problem that a retry cannot fix, exit 64
│   ├── ConfigurationError    the manifest
│   ├── DataError             a data source, a tokenizer or prepared data
│   ├── ModelError            a model directory or configuration
│   ├── RunDirectoryError     the run directory belongs to something else, or cannot be written
│   ├── CheckpointError       checkpoints exist, but none of them can be used
│   ├── TaskInputError        a user-defined task failed before the run's first step
│   └── FencedError           a newer process has claimed this run directory
├── HostError                 a problem of this host or moment, exit 70: retried here, then on another host
│   └── VolumeError           the volume could not be read or written, even after retries
├── TaskError                 a user-defined task failed in a later step
├── SaveError                 several checkpoints in a row could not be written
├── PeerLostError             another process of the group is gone, or the group was given up
└── DivergedError             ranks that should hold the same state do not
"""

from evergrad_common.causes import Trouble
from evergrad_common.contract import ErrorKind
from evergrad_manifest.errors import EvergradError, InputError


def is_agreed(error: BaseException) -> bool:
    """Return whether all ranks of a world raise ``error`` together, so that only rank 0 needs to report it.

    The attribute ``is_agreed`` of the error's class determines the result; the default is false.
    """
    return bool(getattr(error, "is_agreed", False))


class DataError(InputError):
    """A data source, a tokenizer or prepared data cannot be used."""

    code = "input.data"


class ModelError(InputError):
    """A model configuration or directory cannot be used."""

    code = "input.model"


class RunDirectoryError(InputError):
    """The run directory belongs to another run, or cannot be written."""

    code = "input.run_directory"


class CheckpointError(InputError):
    """Checkpoints exist, but none of them can be used."""

    code = "input.checkpoint"
    is_agreed = True


class TaskInputError(InputError):
    """A user-defined task failed before the run completed its first step."""

    code = "input.task"


class FencedError(InputError):
    """A newer process has claimed this run directory, so this process must not write to it any more."""

    code = "input.fenced"
    is_agreed = True
    trouble: Trouble = "fenced"


class HostError(EvergradError):
    """This host cannot do its work at the moment.

    Another host can, or this host can later. The files of the run are not the cause.
    """

    code = "environment.host"
    kind = ErrorKind.ENVIRONMENT


class VolumeError(HostError):
    """The volume could not be read or written, even after retries."""

    code = "environment.volume"

    def __init__(self, message: str, trouble: Trouble | None = None) -> None:
        """``trouble`` is the cause of the failure, or None if it is not known."""
        self.trouble = trouble
        super().__init__(message)


class TaskError(EvergradError):
    """A user-defined task failed after earlier steps succeeded. The message names its file and line."""

    code = "internal.task"


class SaveError(EvergradError):
    """Several checkpoints in a row could not be written. All ranks raise this error together."""

    code = "internal.save"
    is_agreed = True

    def __init__(
        self,
        message: str,
        kind: ErrorKind = ErrorKind.INTERNAL,
        trouble: Trouble = "other",
    ) -> None:
        """``kind`` is ENVIRONMENT if only the volume or the host caused the failures. The run can then
        continue after the volume or host is repaired. ``trouble`` is the cause of the last failure."""
        self.kind = kind
        self.trouble = trouble
        super().__init__(message)


class PeerLostError(EvergradError):
    """A collective cannot complete, because another process of the group is gone or the group was abandoned.

    The collective has not updated the state.
    """

    code = "peer.lost"
    kind = ErrorKind.PEER


class DivergedError(EvergradError):
    """Ranks hold different states, or are at different steps.

    All ranks raise this error together. Nothing was updated or saved.
    """

    code = "numeric.diverged"
    kind = ErrorKind.NUMERIC

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        """``ranks`` are the ranks with a wrong state: all ranks if the correct state cannot be determined."""
        self.ranks = ranks
        super().__init__(message)

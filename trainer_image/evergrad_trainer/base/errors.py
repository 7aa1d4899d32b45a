"""The trainer's errors, one tree. Each carries the exit code its process ends with.

EvergradError                 internal, exit 70
├── InputError                what a retry cannot cure, exit 64
│   ├── ConfigurationError    the manifest
│   ├── DataError             a source, a tokenizer or prepared data
│   ├── ModelError            a model directory or configuration
│   ├── RunDirectoryError     the run directory belongs to something else, or cannot be written
│   ├── CheckpointError       checkpoints exist and none can be used
│   ├── TaskInputError        a task of the user's own cannot work: it failed before the run's first step
│   └── FencedError           a newer process has claimed this run directory
├── HostError                 trouble of this host or this moment, exit 70: retried here, then on another host
│   └── VolumeError           the volume could not be read or written at this moment
├── TaskError                 a task of the user's own failed in a later step
├── SaveError                 checkpoints could not be written, several times in a row
├── PeerLostError             another process of the group is gone, or the group was given up
└── DivergedError             ranks that should hold the same state do not
"""

from evergrad_common.causes import Trouble
from evergrad_common.contract import ErrorKind
from evergrad_manifest.errors import EvergradError, InputError


def is_agreed(error: BaseException) -> bool:
    """Whether all ranks of a world raise ``error`` together, so that rank 0 speaks for them: its class says
    so."""
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
    """Checkpoints exist and none of them can be used."""

    code = "input.checkpoint"
    is_agreed = True


class TaskInputError(InputError):
    """A task of the user's own cannot work: its code failed before the run had made a step."""

    code = "input.task"


class FencedError(InputError):
    """A newer process has claimed this run directory; this one must not write any more."""

    code = "input.fenced"
    is_agreed = True
    trouble: Trouble = "fenced"


class HostError(EvergradError):
    """This host cannot do its part now.

    Another host, or this one later, can; the run's files are not to blame.
    """

    code = "environment.host"
    kind = ErrorKind.ENVIRONMENT


class VolumeError(HostError):
    """The volume could not be read or written, also after it was tried again."""

    code = "environment.volume"

    def __init__(self, message: str, trouble: Trouble | None = None) -> None:
        """``trouble``: what was wrong with the volume; None where that is not known."""
        self.trouble = trouble
        super().__init__(message)


class TaskError(EvergradError):
    """A task of the user's own failed in a step after others had gone well. Names its file and line."""

    code = "internal.task"


class SaveError(EvergradError):
    """Checkpoints could not be written, several times in a row. All ranks raise it together."""

    code = "internal.save"
    is_agreed = True

    def __init__(
        self,
        message: str,
        kind: ErrorKind = ErrorKind.INTERNAL,
        trouble: Trouble = "other",
    ) -> None:
        """``kind``: ENVIRONMENT where only the volume or the host was to blame; the run then continues once
        that is mended. ``trouble``: what kept the last save from being made."""
        self.kind = kind
        self.trouble = trouble
        super().__init__(message)


class PeerLostError(EvergradError):
    """A collective cannot end: another process of the group is gone, or the group was given up.

    Nothing was updated.
    """

    code = "peer.lost"
    kind = ErrorKind.PEER


class DivergedError(EvergradError):
    """Ranks hold different states, or are at different steps.

    All ranks raise it together; nothing was updated or saved.
    """

    code = "numeric.diverged"
    kind = ErrorKind.NUMERIC

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        """``ranks``: those whose state is wrong; all of them where nobody can tell who is right."""
        self.ranks = ranks
        super().__init__(message)

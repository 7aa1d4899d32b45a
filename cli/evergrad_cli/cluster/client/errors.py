"""Errors between this machine and a cluster, below the trainer's tree of errors.

InputError                  exit 64
└── ClusterInputError       what the user named or asked for cannot be
    ├── MissingClientError  the Kubernetes client is not installed
    ├── KubeconfigError     no usable kubeconfig or context
    ├── NotFoundError       the API server has no such object, or does not know TrainingRuns
    └── RefusedError        the API server says no: not allowed, not valid, or in conflict with another writer
EvergradError               exit 70
└── UnreachableError        no answer, or the answer of a server in trouble; may work later
"""

from enum import IntEnum
from typing import Final

from evergrad_common.contract import ErrorKind
from evergrad_manifest.errors import EvergradError, InputError, Problem

TIMED_OUT: Final = 124
"""Exit code of a wait that took too long, as of timeout(1)."""
CHECK_FAILED: Final = 1
"""Exit code of ``doctor`` when something of the cluster fails."""


class ResponseStatus(IntEnum):
    """HTTP statuses of an API server that commands treat differently."""

    UNAUTHORIZED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    CONFLICT = 409
    GONE = 410
    INVALID = 422
    TOO_MANY = 429


class ClusterInputError(InputError):
    """The user named or asked for something that cannot be."""

    code = "input.cluster"


class MissingClientError(ClusterInputError):
    """The optional extra ``cluster`` is not installed."""

    def __init__(self) -> None:
        why = "commands for a cluster need it; training does not"
        remedy = (
            "Install it, in a clone of Evergrad: "
            "pip install ./common ./coordinator ./manifest './cli[cluster]'"
        )
        super().__init__(Problem("", "the Kubernetes client is not installed", why, remedy))


class KubeconfigError(ClusterInputError):
    """There is no usable kubeconfig, or it has no such context."""


class NotFoundError(ClusterInputError):
    """The API server has no such object. ``is_kind_unknown``: it does not serve this kind at all."""

    def __init__(self, problem: Problem, *, is_kind_unknown: bool = False) -> None:
        self.is_kind_unknown = is_kind_unknown
        super().__init__(problem)


class RefusedError(ClusterInputError):
    """The API server refuses the request.

    ``status`` is its HTTP status; ``managers`` are the owners of the fields in conflict.
    """

    def __init__(
        self, *problems: Problem, status: int, managers: frozenset[str] = frozenset()
    ) -> None:
        self.status = status
        self.managers = managers
        super().__init__(*problems)

    @property
    def may_pass(self) -> bool:
        """Whether an API server that starts, or loses its authenticator, answers so for a while."""
        return self.status in (ResponseStatus.UNAUTHORIZED, ResponseStatus.FORBIDDEN)


class UnreachableError(EvergradError):
    """The cluster does not answer, or is in trouble. Trying again may help."""

    code = "environment.cluster"
    kind = ErrorKind.ENVIRONMENT

"""Errors between this machine and a cluster. They extend the trainer's tree of errors.

InputError                  exit 64
└── ClusterInputError       the named object or the request is not possible
    ├── MissingClientError  the Kubernetes client is not installed
    ├── KubeconfigError     no usable kubeconfig or context
    ├── NotFoundError       the API server does not have the object, or does not serve TrainingRuns
    └── RefusedError        the request is not allowed, not valid, or in conflict with another writer
EvergradError               exit 70
└── UnreachableError        no answer, or an answer that reports a server error; a retry may succeed
"""

from enum import IntEnum
from typing import Final

from evergrad_common.contract import ErrorKind
from evergrad_manifest.errors import EvergradError, InputError, Problem

TIMED_OUT: Final = 124
"""Exit code of a wait that timed out, the same as for timeout(1)."""
CHECK_FAILED: Final = 1
"""Exit code of ``doctor`` if a check of the cluster fails."""


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
    """The user named or requested something that is not possible."""

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
    """There is no usable kubeconfig, or the kubeconfig does not have the context."""


class NotFoundError(ClusterInputError):
    """The API server does not have the object. ``is_kind_unknown``: it does not serve this kind at all."""

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
        """Return whether a retry may succeed: an API server that starts or has lost its authenticator also
        answers so."""
        return self.status in (ResponseStatus.UNAUTHORIZED, ResponseStatus.FORBIDDEN)


class UnreachableError(EvergradError):
    """The cluster does not answer, or answers with a server error. A retry may succeed."""

    code = "environment.cluster"
    kind = ErrorKind.ENVIRONMENT

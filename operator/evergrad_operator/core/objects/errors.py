"""The operator's errors, one tree.

OperatorError         the operator cannot do what it should
├── SpecError         the envelope of a run cannot be read
├── ApiError          the API server refused a request, or did not answer it
├── UnauthorizedError a coordinator does not take the run's token
├── LeaseLostError    another operator may be writing, so this one may not
└── SettingsError     the operator's own settings or surroundings are wrong
"""

from collections.abc import Sequence

from evergrad_manifest.errors import Problem
from evergrad_operator.core.objects.problems import list_problems


class OperatorError(Exception):
    """The operator cannot do what it should. The message says where, what, why and what helps."""


class SpecError(OperatorError):
    """The envelope of a TrainingRun cannot be read: no webhook was asked, and the CRD is of
    another version."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(list_problems(problems))


class ApiError(OperatorError):
    """The API server refused a request (``status``, its ``reason`` and message), or did not answer it
    (``status`` 0).

    ``retry_after``: seconds it asked to wait. ``causes``: reasons of the single causes.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after: float | None = None,
        causes: tuple[str, ...] = (),
    ) -> None:
        self.status, self.reason, self.message, self.retry_after, self.causes = (
            status,
            reason,
            message,
            retry_after,
            causes,
        )
        super().__init__(f"{status or 'no answer'} {reason}: {message}")

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed in a retry."""
        return self.status in (0, 429, 500, 502, 503, 504)


class UnauthorizedError(OperatorError):
    """A coordinator answers 401: it was given another token than the operator derives for its run."""


class LeaseLostError(OperatorError):
    """The lease is lost or has run out. Nothing may be written until it is held again."""

    def __init__(self) -> None:
        super().__init__(
            "the lease is lost or has run out: another operator may be writing. Nothing is written until "
            "this process holds the lease again"
        )


class SettingsError(OperatorError):
    """The operator cannot start with these settings in these surroundings."""


class ProgressError(OperatorError):
    """The response from a coordinator's status port does not come from a coordinator of this run."""

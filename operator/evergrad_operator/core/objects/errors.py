"""The operator's errors, as one tree.

OperatorError         the operator cannot perform an operation
├── SpecError         the envelope of a run cannot be read
├── ApiError          the API server refused a request, or did not answer it
├── UnauthorizedError a coordinator does not accept the run's token
├── LeaseLostError    another operator may be writing, so this one must not
└── SettingsError     the operator's own settings or environment are wrong
"""

from collections.abc import Sequence

from evergrad_manifest.errors import Problem
from evergrad_operator.core.objects.problems import list_problems


class OperatorError(Exception):
    """The operator cannot perform an operation. The message states where, what, why and the remedy."""


class SpecError(OperatorError):
    """The envelope of a TrainingRun cannot be read, because no webhook has validated it and the CRD has
    another version."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(list_problems(problems))


class ApiError(OperatorError):
    """The API server refused a request (``status``, its ``reason`` and message), or did not answer it
    (``status`` 0).

    ``retry_after``: seconds that it requested to wait. ``causes``: reasons of the single causes.
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
    """A coordinator answers 401: its token differs from the token that the operator derives for its run."""


class LeaseLostError(OperatorError):
    """The lease is lost or has expired. Nothing may be written until it is held again."""

    def __init__(self) -> None:
        super().__init__(
            "the lease is lost or has expired: another operator may be writing. Nothing is written until "
            "this process holds the lease again"
        )


class SettingsError(OperatorError):
    """The operator cannot start with these settings in this environment."""


class ProgressError(OperatorError):
    """The response from a coordinator's status port does not come from a coordinator of this run."""

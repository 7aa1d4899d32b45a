"""Converts an unsuccessful answer of the API server to one of our errors, with the paths of the fields.
Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from evergrad_cli.cluster.client.errors import (
    NotFoundError,
    RefusedError,
    ResponseStatus,
    UnreachableError,
)
from evergrad_manifest.errors import EvergradError, Problem

_MANAGER: Final = re.compile(r'conflict with "((?:[^"\\]|\\.)*)"')
_TERMINATING: Final = "NamespaceTerminating"
"""Cause in the API server's answer if an object is created in a namespace that is being deleted."""
# A proxy may answer with a whole page of HTML.
_LONGEST: Final = 1000
NO_CRD: Final = Problem(
    "",
    "this cluster does not know TrainingRuns",
    "the CustomResourceDefinition trainingruns.evergrad.dev is not installed, or serves no v1alpha1",
    "Install the chart (helm install evergrad charts/evergrad), then look with evergrad doctor",
)


def error_of(status: int, body: bytes, *, what: str) -> EvergradError:
    """Return the error for an answer of HTTP ``status``.

    ``what`` is the name of the requested object in messages, for example ``trainingrun docs-lm``.
    """
    # The API server answers with a Status. Any other body is from a proxy and is shown as it is.
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    is_status = isinstance(parsed, Mapping) and parsed.get("kind") == "Status"
    answer: Mapping[str, Any] = parsed if is_status else {}
    plain = body[:_LONGEST].decode("utf-8", "replace").strip()
    message = str(answer.get("message") or plain)[:_LONGEST]

    if status == ResponseStatus.NOT_FOUND:
        return _not_found(answer, message, what)
    # Errors of the request: authentication, permissions, and conflicts with other writers.
    if status == ResponseStatus.UNAUTHORIZED:
        remedy = (
            "Log in again, or look at the user of the context: kubectl config view --minify"
        )
        return RefusedError(
            Problem(what, "the cluster does not accept these credentials", message, remedy),
            status=status,
        )
    if status == ResponseStatus.FORBIDDEN:
        return RefusedError(_forbidden(what, message, _causes(answer)), status=status)
    if status == ResponseStatus.CONFLICT:
        return _conflict(answer, message, what)
    # Errors of the server, which are temporary: a command that waits retries.
    if status >= 500 or status == ResponseStatus.TOO_MANY:
        return UnreachableError(
            f"{what}: the cluster answers with {status}; {message or 'it gives no reason'}. Try again."
        )

    # Wrong input, with a cause for each field. The webhook and the schema use the same form.
    refusal = "the cluster refuses this"
    problems = [
        Problem(_field(cause, what), str(cause.get("message", "")) or refusal)
        for cause in _causes(answer)
    ]
    return RefusedError(*problems or [Problem(what, refusal, message)], status=status)


def _not_found(answer: Mapping[str, Any], message: str, what: str) -> NotFoundError:
    """Return the error for a kind, a namespace or an object that the server does not have."""
    details = answer.get("details")
    if not isinstance(details, Mapping) or not details.get("name"):
        is_ours = "trainingrun" in what
        unknown = Problem(what, "is not known to this cluster", message)
        return NotFoundError(NO_CRD if is_ours else unknown, is_kind_unknown=True)
    if details.get("kind") == "namespaces":
        name = details["name"]
        remedy = f"Create it (kubectl create namespace {name}), or name another with -n"
        return NotFoundError(Problem(f"namespace {name}", "does not exist", "", remedy))
    remedy = "evergrad list -A shows all runs"
    return NotFoundError(Problem(what, "does not exist", "", remedy))


def _forbidden(what: str, message: str, causes: Sequence[Mapping[str, Any]]) -> Problem:
    # The quota admission plug-in answers 403 with the reason Forbidden and no cause, as RBAC does. Only the
    # text distinguishes them.
    if "exceeded quota" in message:
        return Problem(
            what,
            "is beyond the namespace's quota",
            message,
            "Ask for less, or for a larger quota",
        )
    if any(cause.get("reason") == _TERMINATING for cause in causes):
        return Problem(
            what,
            "cannot be created",
            message,
            "The namespace is being deleted: name another with -n",
        )
    return Problem(
        what,
        "is not allowed",
        message,
        "Ask for the right, or see which you have: evergrad doctor",
    )


def _conflict(answer: Mapping[str, Any], message: str, what: str) -> RefusedError:
    causes = _causes(answer)

    # Server-side apply names the owner of a field only in the message, not in a field of the answer.
    managers = frozenset(
        match[1]
        for cause in causes
        if (match := _MANAGER.search(str(cause.get("message", ""))))
    )
    if not managers:
        return RefusedError(
            Problem(what, "was changed by another client just now", message, "Try again"),
            status=ResponseStatus.CONFLICT,
        )
    problems = [
        Problem(
            _field(cause, what),
            f"belongs to another writer: {cause.get('message', '')}",
            "",
            "--force-conflicts takes it over",
        )
        for cause in causes
    ]
    return RefusedError(*problems, status=ResponseStatus.CONFLICT, managers=managers)


def _causes(answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    details = answer.get("details")
    found = details.get("causes") if isinstance(details, Mapping) else None
    return (
        [cause for cause in found if isinstance(cause, Mapping)]
        if isinstance(found, list)
        else []
    )


def _field(cause: Mapping[str, Any], what: str) -> str:
    field = str(cause.get("field") or "").removeprefix(".")
    return what if field in ("", "<nil>") else field

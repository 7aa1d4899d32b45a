"""The validating webhook's answer to one request: the problems that ``evergrad validate`` finds, and those
that only this installation has. Pure.

A denial's causes carry one problem each, so that kubectl prints path, reason and remedy a line, as for the
schema's own errors.
"""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_coordinator.contract import API_GROUP, KIND
from evergrad_manifest.errors import Problem
from evergrad_manifest.validation import is_open, problems_of
from evergrad_operator.installation import NOTHING_ALLOWED, Installation, find_refusals
from evergrad_operator.problems import list_problems
from evergrad_operator.raw import get_map, get_text

REVIEW_VERSION: Final = "admission.k8s.io/v1"
_LONGEST_MESSAGE: Final = 32_000
"""Longest message of a denial, in bytes; the causes beside it hold every problem that is listed at all."""
_UNPROCESSABLE: Final = 422
MAX_VALUES: Final = 40_000
"""Most values of a request, mappings and lists included. A check takes up to 3 KiB for each, and is asked
before the API server holds lists to their bounds. Files have some hundreds."""
_CHANGES_AT_ANY_TIME: Final = ("suspend",)
"""Fields of ``spec`` that may change even where the rest would be refused today: a wrong run can always be
stopped."""


def find_problems(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    installation: Installation = NOTHING_ALLOWED,
) -> tuple[Problem, ...]:
    """Find the reasons why ``new`` may not be stored in place of ``old``; empty if it may.

    A problem that an older version accepted is no reason to refuse a change of something else.
    """
    if get_map(new, "metadata").get("deletionTimestamp") is not None:
        # Only finalizers change on the way out, and nothing may hold that up.
        return ()
    if old is None:
        # The API server may make a name of ``generateName`` after it has asked.
        metadata = get_map(new, "metadata")
        start = get_text(metadata, "generateName")
        if start and not metadata.get("name"):
            new = {**new, "metadata": {**metadata, "name": f"{start}xxxxx"}}
        return (*problems_of(new), *find_refusals(new, installation))
    # Labels, annotations and owners are the API server's concern, and so are unchanged fields of the spec.
    before, after = (
        {
            key: value
            for key, value in get_map(one, "spec").items()
            if key not in _CHANGES_AT_ANY_TIME
        }
        for one in (old, new)
    )
    if before == after:
        return ()
    problems = (*problems_of(new, old=old), *find_refusals(new, installation))
    if not problems:
        return ()
    # Only problems that the change brings are held against it. A file that was refused before its run began
    # is to be corrected as a whole, but for what an installation may have taken off its lists.
    known = set(find_refusals(old, installation))
    if not is_open(old):
        known.update(problems_of(old))
    return tuple(problem for problem in problems if problem not in known)


def review(
    raw: Mapping[str, Any], installation: Installation = NOTHING_ALLOWED
) -> dict[str, Any]:
    """Return the AdmissionReview that answers ``raw``."""
    request = get_map(raw, "request")
    old = request.get("oldObject")
    problems = find_problems(
        get_map(request, "object"),
        old if isinstance(old, Mapping) else None,
        installation,
    )
    return _answer(
        get_text(request, "uid"),
        problems,
        name=get_text(request, "name"),
    )


def deny_depth(uid: str) -> dict[str, Any]:
    """Return the AdmissionReview that refuses an object nested too deeply for this program to read."""
    why = "hundreds of mappings or lists lie in one another"
    return _answer(
        uid,
        (
            Problem(
                "spec",
                "is nested too deeply",
                why,
                "Write it flatter",
            ),
        ),
        name="",
    )


def has_too_many_values(request: Mapping[str, Any]) -> bool:
    """Return whether a request has more than MAX_VALUES values, with those of the object before."""
    pending: list[Any] = [request]
    count = 0
    # Without recursion, which is what a deep object would break.
    while pending and count <= MAX_VALUES:
        value = pending.pop()
        if isinstance(value, Mapping | list):
            count += len(value)
            inner = value.values() if isinstance(value, Mapping) else value
            pending += [one for one in inner if isinstance(one, Mapping | list)]
    return count > MAX_VALUES


def deny_size(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the AdmissionReview that refuses an object with too many values for a check."""
    request = get_map(raw, "request")
    problem = Problem(
        "spec",
        f"has more than {MAX_VALUES} values",
        "those of the object that is there already count, too",
        "Put long lists into files that the run reads",
    )
    # Only finalizers change on the way out, and nothing may hold that up.
    metadata = get_map(get_map(request, "object"), "metadata")
    is_going = metadata.get("deletionTimestamp") is not None
    return _answer(
        get_text(request, "uid"),
        () if is_going else (problem,),
        name=get_text(request, "name"),
    )


def _answer(uid: str, problems: tuple[Problem, ...], *, name: str) -> dict[str, Any]:
    """Return the AdmissionReview that lets an object without problems pass."""
    response: dict[str, Any] = {"uid": uid, "allowed": not problems}
    if problems:
        # kubectl prints the path of each cause itself.
        causes = [
            {
                "reason": "FieldValueInvalid",
                "field": problem.path,
                "message": str(problem).removeprefix(f"{problem.path}: "),
            }
            for problem in problems
        ]
        response["status"] = {
            "status": "Failure",
            "code": _UNPROCESSABLE,
            "reason": "Invalid",
            "message": list_problems(problems, most=_LONGEST_MESSAGE),
            "details": {
                "group": API_GROUP,
                "kind": KIND,
                "name": name,
                "causes": causes,
            },
        }
    return {
        "apiVersion": REVIEW_VERSION,
        "kind": "AdmissionReview",
        "response": response,
    }

"""The validating webhook's answer to one request: the problems that ``evergrad validate`` finds, and those
that only this installation has. Pure.

A denial's causes carry one problem each, so that kubectl prints path, reason and remedy a line, as for the
schema's own errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common.contract import API_GROUP, KIND
from evergrad_manifest.errors import Problem
from evergrad_manifest.validation import changes_of, is_open
from evergrad_operator.core.objects.installation import NOTHING_ALLOWED, Installation
from evergrad_operator.core.objects.problems import list_problems
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.observe.profiles import (
    NamespaceProfile,
    RunProfile,
    find_kept,
    resolve,
)
from evergrad_operator.core.observe.start_checks import Verdict, check

REVIEW_VERSION: Final = "admission.k8s.io/v1"
_LONGEST_MESSAGE: Final = 32_000
"""Longest message of a denial, in bytes; the causes beside it hold every problem that is listed at all."""
_UNPROCESSABLE: Final = 422
MAX_VALUES: Final = 40_000
"""Most values of an object, mappings and lists included. A check takes up to 3 KiB for each, and is asked
before the API server holds lists to their bounds; large requests are checked one at a time. Files have some
hundreds."""
_LONGEST_WARNING: Final = 250
_MOST_WARNINGS: Final = 5
"""An API server passes on 4 KiB of warnings."""
_CHANGES_AT_ANY_TIME: Final = ("suspend",)
"""Fields of ``spec`` that may change even where the rest would be refused today: a wrong run can always be
stopped."""


@dataclass(frozen=True)
class Judgement:
    """The answer to one request. ``warnings``: what is wrong with its profile, for kubectl to print."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


ALLOWED: Final = Judgement()


def find_problems(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    installation: Installation = NOTHING_ALLOWED,
    own: NamespaceProfile | None = None,
) -> tuple[Problem, ...]:
    """Find the reasons why ``new`` may not be stored in place of ``old``; empty if it may."""
    return judge(new, old, installation, own).problems


def judge(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    installation: Installation = NOTHING_ALLOWED,
    own: NamespaceProfile | None = None,
) -> Judgement:
    """Judge whether ``new`` may be stored in place of ``old``, as the operator will judge whether it may
    begin.

    ``own``: the profile of the namespace. A problem that an older version accepted is no reason to refuse a
    change of something else. A profile that is wrong is no reason to refuse a run, which waits for its
    correction.
    """
    if is_of_no_concern(new, old):
        return ALLOWED
    if old is None:
        # The API server may make a name of ``generateName`` after it has asked.
        metadata = get_map(new, "metadata")
        start = get_text(metadata, "generateName")
        if start and not metadata.get("name"):
            new = {**new, "metadata": {**metadata, "name": f"{start}xxxxx"}}
        verdict = check(new, installation, _profile_of(new, installation, own))
        return _answer_of(verdict, verdict.problems)

    # The API server takes the status of an update from the stored object, and so does this.
    new = {**new, "status": get_map(old, "status")}
    verdict = check(new, installation, _profile_of(new, installation, own))
    before = check(old, installation, _profile_of(old, installation, own))
    problems = verdict.problems
    # What is fixed is compared in a file without new problems: those that an older version has accepted are
    # no leave to change it.
    if set(problems) - set(verdict.refusals) <= set(before.problems):
        problems = (*problems, *changes_of(new, old))
    if not problems:
        return _answer_of(verdict, ())
    # Only problems that the change brings are held against it. A file that was refused before its run began
    # is to be corrected as a whole, but for what an installation may have taken off its lists.
    known = set(before.refusals)
    if not is_open(old):
        known.update(before.problems)
    return _answer_of(verdict, tuple(one for one in problems if one not in known))


def is_of_no_concern(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
    """Whether nothing of a request is checked: the object is on its way out, or changes only what may change
    at any time."""
    # Only finalizers change on the way out, and nothing may hold that up.
    if get_map(new, "metadata").get("deletionTimestamp") is not None:
        return True
    if old is None:
        return False
    # Labels, annotations and owners are the API server's concern, and so are unchanged fields of the spec.
    before, after = (
        {
            key: value
            for key, value in get_map(one, "spec").items()
            if key not in _CHANGES_AT_ANY_TIME
        }
        for one in (old, new)
    )
    return before == after


def _profile_of(
    run: Mapping[str, Any], installation: Installation, own: NamespaceProfile | None
) -> RunProfile:
    """Return the profile that the operator would check this run with."""
    kept = find_kept(run, installation.profiles)
    return kept or resolve(run, installation.profiles, own, installation)


def _answer_of(verdict: Verdict, problems: tuple[Problem, ...]) -> Judgement:
    if problems:
        # With all that is wrong: a volume may be missing because the profile that has it is wrong.
        return Judgement((*problems, *verdict.of_profile))
    return Judgement((), verdict.of_profile)


def review(
    raw: Mapping[str, Any],
    installation: Installation = NOTHING_ALLOWED,
    own: NamespaceProfile | None = None,
) -> dict[str, Any]:
    """Return the AdmissionReview that answers ``raw``. ``own``: the profile of its namespace."""
    request = get_map(raw, "request")
    found = judge(get_map(request, "object"), _old_of(request), installation, own)
    answer = _answer(
        get_text(request, "uid"), found.problems, name=get_text(request, "name")
    )
    if found.warnings:
        # The API server passes on at most 120 characters of a warning whole.
        answer["response"]["warnings"] = [
            str(one)[:_LONGEST_WARNING] for one in found.warnings[:_MOST_WARNINGS]
        ]
    return answer


def _old_of(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    old = request.get("oldObject")
    return old if isinstance(old, Mapping) else None


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
    """Return whether the object of a request, or the object before it, has more than MAX_VALUES values.

    They are counted apart: a run that was created may be changed.
    """
    return any(_is_too_large(request.get(key)) for key in ("object", "oldObject"))


def _is_too_large(value: Any) -> bool:
    pending: list[Any] = [value]
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
        "a check of so many takes too long",
        "Put long lists into files that the run reads",
    )
    # A run that was stored without a webhook can still be suspended, marked and deleted.
    try:
        is_let_in = is_of_no_concern(get_map(request, "object"), _old_of(request))
    except RecursionError:
        is_let_in = False
    return _answer(
        get_text(request, "uid"),
        () if is_let_in else (problem,),
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

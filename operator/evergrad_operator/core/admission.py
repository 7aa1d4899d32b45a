"""Builds the validating webhook's response to a request: the problems that ``evergrad validate`` finds, and
the problems by the rules of this installation. Pure.

Each cause of a denial contains one problem, so that kubectl prints path, reason and remedy on one line, as
for errors of the schema.
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
"""Maximum length of the message of a denial, in bytes. The causes next to it contain all listed problems."""
_UNPROCESSABLE: Final = 422
MAX_VALUES: Final = 40_000
"""Maximum number of values in an object, including mappings and lists. A check uses up to 3 KiB of memory for
each value, and runs before the API server enforces the limits of lists. Large requests are checked one at a
time. Typical files have several hundred values."""
_LONGEST_WARNING: Final = 250
_MOST_WARNINGS: Final = 5
"""Maximum number of warnings. An API server passes on at most 4 KiB of warnings."""
_CHANGES_AT_ANY_TIME: Final = ("suspend",)
"""Fields of ``spec`` that may change even if the rest of the spec would be refused now, so that every run can
be stopped."""


@dataclass(frozen=True)
class Judgement:
    """The result for one request. ``warnings``: problems of the profile, which kubectl prints."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


ALLOWED: Final = Judgement()


def find_problems(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    installation: Installation = NOTHING_ALLOWED,
    own: NamespaceProfile | None = None,
) -> tuple[Problem, ...]:
    """Return the problems that prevent ``new`` from replacing ``old`` (may be empty)."""
    return judge(new, old, installation, own).problems


def judge(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    installation: Installation = NOTHING_ALLOWED,
    own: NamespaceProfile | None = None,
) -> Judgement:
    """Return whether ``new`` may replace ``old``, by the same rules that the operator uses to start a run.

    ``old``: None for a new run. ``own``: the profile of the namespace. A problem that an older version
    accepted does not prevent a change of another field. A profile that is not valid does not prevent a run
    from being stored; the run waits until the profile is corrected.
    """
    if is_of_no_concern(new, old):
        return ALLOWED
    if old is None:
        # The API server may generate the name from ``generateName`` after it has called the webhook.
        metadata = get_map(new, "metadata")
        start = get_text(metadata, "generateName")
        if start and not metadata.get("name"):
            new = {**new, "metadata": {**metadata, "name": f"{start}xxxxx"}}
        verdict = check(new, installation, _profile_of(new, installation, own))
        return _answer_of(verdict, verdict.problems)

    # Use the stored status, as the API server does for an update.
    new = {**new, "status": get_map(old, "status")}
    verdict = check(new, installation, _profile_of(new, installation, own))
    before = check(old, installation, _profile_of(old, installation, own))
    problems = verdict.problems
    # Check fixed fields for changes if the file has no new problems. Problems that an older version accepted
    # do not permit such a change.
    if set(problems) - set(verdict.refusals) <= set(before.problems):
        problems = (*problems, *changes_of(new, old))
    if not problems:
        return _answer_of(verdict, ())
    # Report only problems that the change introduces. If the run has not begun, report all problems except
    # values that the installation no longer allows, because the whole file can still be corrected.
    known = set(before.refusals)
    if not is_open(old):
        known.update(before.problems)
    return _answer_of(verdict, tuple(one for one in problems if one not in known))


def is_of_no_concern(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
    """Return whether a request needs no check.

    This is the case if the object is being deleted, or if only fields differ that may change at any time.
    """
    # During a deletion only finalizers change, and the webhook must not block that.
    if get_map(new, "metadata").get("deletionTimestamp") is not None:
        return True
    if old is None:
        return False
    # Compare only the spec. Labels, annotations and owners are not checked.
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
    """Return the profile with which the operator would check this run."""
    kept = find_kept(run, installation.profiles)
    return kept or resolve(run, installation.profiles, own, installation)


def _answer_of(verdict: Verdict, problems: tuple[Problem, ...]) -> Judgement:
    if problems:
        # Add the problems of the profile, because they may be the cause. For example, a volume may be missing
        # because the profile that defines it is not valid.
        return Judgement((*problems, *verdict.of_profile))
    return Judgement((), verdict.of_profile)


def review(
    raw: Mapping[str, Any],
    installation: Installation = NOTHING_ALLOWED,
    own: NamespaceProfile | None = None,
) -> dict[str, Any]:
    """Return the AdmissionReview with the response to ``raw``. ``own``: the profile of the namespace."""
    request = get_map(raw, "request")
    found = judge(get_map(request, "object"), _old_of(request), installation, own)
    answer = _answer(
        get_text(request, "uid"), found.problems, name=get_text(request, "name")
    )
    if found.warnings:
        # Limit the number and length of warnings, because the API server limits their total size.
        answer["response"]["warnings"] = [
            str(one)[:_LONGEST_WARNING] for one in found.warnings[:_MOST_WARNINGS]
        ]
    return answer


def _old_of(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    old = request.get("oldObject")
    return old if isinstance(old, Mapping) else None


def deny_depth(uid: str) -> dict[str, Any]:
    """Return the AdmissionReview that refuses an object that is nested too deeply to be parsed."""
    why = "hundreds of mappings or lists are nested in one another"
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

    Both objects are counted separately, so that a run that was created can be changed.
    """
    return any(_is_too_large(request.get(key)) for key in ("object", "oldObject"))


def _is_too_large(value: Any) -> bool:
    pending: list[Any] = [value]
    count = 0
    # Iterate without recursion, because a deeply nested object would exceed the recursion limit.
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
    # Allow a run that was stored without the webhook to be suspended, labelled and deleted.
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
    """Return the AdmissionReview that allows an object without problems, and denies an object with
    problems."""
    response: dict[str, Any] = {"uid": uid, "allowed": not problems}
    if problems:
        # Remove the path from the message, because kubectl prints the field of each cause.
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

"""Checks whether a run may begin. The webhook and the operator call the check with the same arguments. Pure.

The check includes the defaults of the run's profile, because pods are built from both. The chart's CEL rules
are a smaller copy for installations without a webhook. They check neither profiles nor the manifest's rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_manifest.profile import apply_defaults, check_allowed
from evergrad_manifest.reading.problems import at_most
from evergrad_manifest.reading.validation import check_run
from evergrad_manifest.validation import manifest_of, with_plain_numbers
from evergrad_operator.core.objects.installation import Installation, find_refusals
from evergrad_operator.core.observe.profiles import RunProfile


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    ``run``: the parsed run; None if any field cannot be read. ``manifest``: the manifest with the defaults of
    its profile. ``problems``: all problems of the run, problems of its file first. ``refusals``: the problems
    by the rules of this installation. ``outdated``: spellings of earlier versions that were accepted.
    ``of_profile``: problems of the profile, which a change of the run's file cannot correct.
    """

    run: TrainingRun | None
    manifest: Mapping[str, Any]
    problems: tuple[Problem, ...]
    refusals: tuple[Problem, ...]
    outdated: tuple[Problem, ...] = ()
    of_profile: tuple[Problem, ...] = ()


def check(
    raw: Mapping[str, Any],
    rules: Installation,
    profile: RunProfile,
    *,
    is_stored: bool = False,
) -> Verdict:
    """Check a raw run from the API server by the general rules, the rules of this installation and its
    profile.

    ``is_stored``: True for a run that is stored already. Spellings of earlier versions are then accepted, so
    that the run can continue.
    """
    document = apply_defaults(raw, profile.defaults)
    manifest: Mapping[str, Any] = manifest_of(document)
    run, found = check_run(manifest)
    outdated: tuple[Problem, ...] = ()
    if run is None and is_stored:
        # If the run cannot be read even with the newer spelling, report the problems of the original
        # spelling, as evergrad validate does.
        plain, named = with_plain_numbers(manifest)
        again, left = check_run(plain) if named else (None, found)
        manifest = plain
        if again is not None:
            run, found, outdated = again, left, named

    # Check the rules of the installation, extended by the names that the profile allows.
    refusals = find_refusals(document, replace(rules, granted=profile.granted))
    # Do not check the devices of a run that began before profiles existed.
    devices = check_allowed(manifest, profile.rdma) if profile.is_known else ()
    # A problem of spec.profile belongs to the run's file, not to the profile.
    of_file = tuple(one for one in profile.problems if one.path == "spec.profile")
    of_profile = tuple(one for one in profile.problems if one.path != "spec.profile")
    return Verdict(
        run,
        manifest,
        at_most([*found, *refusals, *devices, *of_file]),
        refusals,
        outdated,
        of_profile,
    )

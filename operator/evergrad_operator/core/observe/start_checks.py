"""Whether a run may begin: one check, which the webhook and the operator call with the same arguments. Pure.

It judges the run with the defaults of its profile, because the pods are made of both. The chart's CEL rules
are a smaller copy for installations without a webhook: they see neither profiles nor the manifest's rules.
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
    """What is wrong with a run.

    ``run``: None if a single field cannot be read. ``manifest``: what it was read from, with the defaults of
    its profile. ``problems``: all of the run, those of its file first. ``refusals``: those of them that only
    this installation has. ``outdated``: spellings that an earlier version accepted and that were read once
    more. ``of_profile``: what is wrong with the profile itself, which the file cannot correct.
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
    """Check ``raw``, an object as the API server sends it, by the rules of this installation and the profile
    of the run.

    ``is_stored``: spellings of earlier versions are read once more, since such a run continues.
    """
    document = apply_defaults(raw, profile.defaults)
    manifest: Mapping[str, Any] = manifest_of(document)
    run, found = check_run(manifest)
    outdated: tuple[Problem, ...] = ()
    if run is None and is_stored:
        # Where the newer spelling does not make it readable, its problems are reported in the file's own
        # words, as evergrad validate does.
        plain, named = with_plain_numbers(manifest)
        again, left = check_run(plain) if named else (None, found)
        manifest = plain
        if again is not None:
            run, found, outdated = again, left, named

    # What the installation allows, and what the profile allows beyond that.
    refusals = find_refusals(document, replace(rules, granted=profile.granted))
    # A run from before there were profiles continues with whatever it has asked for.
    devices = check_allowed(manifest, profile.rdma) if profile.is_known else ()
    # Which profile a run names is a word of its own file.
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

"""Resolves the profile of a run when the run begins, and stores it in the run's status. Pure.

A run uses a profile of the installation (``spec.profile``, or ``default``). The profile of the namespace
overrides it, and the run's own fields override both. The resolved profile is stored in the status. An edit of
a profile therefore does not affect a run that has begun, until a new ``restartNonce`` restarts the run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.profile import (
    DEFAULT_PROFILE,
    NAMESPACE_PROFILE,
    check_profile,
    merge_defaults,
)
from evergrad_operator.core.objects.installation import (
    NOTHING_ALLOWED,
    Granted,
    Installation,
    find_beyond,
    find_granted,
)
from evergrad_operator.core.objects.names import Phase
from evergrad_operator.core.objects.raw import get_map, get_text

LONGEST_NOTE: Final = 4096
"""Maximum size in bytes of a resolved profile in a status, which is limited to 16 KiB. The list of the
namespace's own names is not counted, because it repeats a part of the profile."""
_OF_NAMESPACE: Final = "ConfigMap "
"""Prefix of the name of a namespace's profile. No profile of the installation has a space in its name."""
UNSETTLED: Final = "unsettled"
"""Note of a run whose profile is not valid or could not be read. The profile is resolved again in each
pass."""


@dataclass(frozen=True)
class RunProfile:
    """The resolved profile of one run.

    ``defaults``: the merged defaults of all profiles. ``rdma``: resource names of the RDMA devices that the
    run may request. ``granted``: images and priority class in the defaults that the installation's profile
    sets.
    ``sources``: names of the profiles for messages, the installation's first. ``is_known``: False for a run
    that began before profiles existed; no profile applies to it. ``is_read``: False if the namespace's
    profile could not be read from the API server.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    rdma: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    is_known: bool = True
    is_read: bool = True
    granted: Granted = field(default_factory=Granted)

    @property
    def note(self) -> str:
        """The text that stores the profile in the status; empty for a run that began before profiles
        existed."""
        if self.problems or not self.is_read:
            return UNSETTLED
        if not self.is_known:
            return ""
        own: dict[str, Any] = {}
        if len(self.sources) > 1:
            # Store the namespace's own names, because they are few. A profile of the installation without a
            # namespace's profile grants all its names.
            names = find_granted(self.defaults).without(self.granted)
            own = {
                "images": sorted(names.images),
                "priorityClasses": sorted(names.priority_classes),
            }
        return _pack(self, own)

    @property
    def text(self) -> str:
        """The names of the profiles, separated by commas, for messages."""
        return ", ".join(self.sources)


NO_PROFILE: Final = RunProfile(is_known=False)
UNREAD_PROFILE: Final = RunProfile(is_known=False, is_read=False)


@dataclass(frozen=True)
class NamespaceProfile:
    """The profile in a namespace's ConfigMap.

    ``raw``: the parsed content. ``problems``: why the content is not a valid profile. ``is_checked``: whether
    ``problems`` contains every problem that can be found without the installation's rules.
    """

    raw: Any = None
    problems: tuple[Problem, ...] = ()
    is_checked: bool = False


def find_kept(run: Mapping[str, Any], installation: str) -> RunProfile | None:
    """Return the profile in the run's status; None if the profile has to be resolved now.

    ``installation``: the profiles of the installation by name, as JSON. A profile is resolved before the run
    begins, and again when a new ``restartNonce`` restarts the run.
    """
    status, spec = get_map(run, "status"), get_map(run, "spec")
    note = get_text(get_map(status, "memory"), "profile")
    if not get_text(status, "recipeHash") or note == UNSETTLED:
        return None
    nonce = get_text(spec, "restartNonce"), get_text(status, "restartNonce")
    if nonce[0] != nonce[1] and get_text(status, "phase") != Phase.COMPLETE:
        return None
    if not note:
        return NO_PROFILE
    try:
        kept = json.loads(note)
        found = RunProfile(
            defaults=dict(kept.get("defaults", {})),
            rdma=tuple(map(str, kept.get("rdma", ()))),
            sources=tuple(map(str, kept.get("from", ()))),
        )

        # The installation grants all names except the names that are stored as the namespace's own.
        names, own = find_granted(found.defaults), kept.get("own")
        first, *others = found.sources or ("",)
        if own is not None:
            images, classes = own.get("images", ()), own.get("priorityClasses", ())
            names = names.without(
                Granted(frozenset(map(str, images)), frozenset(map(str, classes)))
            )
        elif others or first.startswith(_OF_NAMESPACE):
            # Earlier versions did not store the namespace's own names. Use the installation's current
            # profile.
            profile = get_map(parse_profiles(installation), first)
            names = names.within(find_granted(get_map(profile, "defaults")))
        return replace(found, granted=names)
    except (ValueError, TypeError, AttributeError, RecursionError):
        # Another client has changed the status, so the stored profile cannot be read. Resolve it again.
        return None


def resolve(
    run: Mapping[str, Any],
    installation: str,
    own: NamespaceProfile | None,
    rules: Installation = NOTHING_ALLOWED,
) -> RunProfile:
    """Resolve the profile of a run.

    ``installation``: the profiles of the installation by name, as JSON. ``own``: the profile of the
    namespace.
    ``rules``: the installation's rules, which also apply to the namespace's profile. Problems are returned in
    the result. Raises ValueError if ``installation`` is not a JSON object.
    """
    namespace = get_text(get_map(run, "metadata"), "namespace") or "default"
    named = get_text(get_map(run, "spec"), "profile")
    known: dict[str, Any] = {}
    for name, profile in sorted(parse_profiles(installation).items()):
        namespaces = get_map({"profile": profile}, "profile").get("namespaces")
        # If ``namespaces`` is not a valid list, offer the profile to all namespaces, so that check_profile
        # reports the problem.
        if not namespaces or not isinstance(namespaces, list) or namespace in namespaces:
            known[name] = profile

    # A run without spec.profile uses the default profile if there is one for its namespace.
    name = named or DEFAULT_PROFILE
    chosen: Mapping[str, Any] = {}
    problems: list[Problem] = []
    if name in known:
        where = f"profile {name} of the installation (runs.profiles.{name} of the chart)"
        problems += _place(where, check_profile(known[name]))
        chosen = {} if problems else known[name]
    elif named:
        what = f"there is no profile {named!r} for namespace {namespace}"
        remedy = f"Use one of: {', '.join(known)}" if known else "Leave it out"
        problems.append(Problem("spec.profile", what, "", remedy))
    sources = [name] if name in known else []

    defaults: Mapping[str, Any] = chosen.get("defaults") or {}
    granted = find_granted(defaults)
    if own is not None:
        where = f"{_OF_NAMESPACE}{namespace}/{NAMESPACE_PROFILE}"
        found = _check_own(own, replace(rules, granted=granted))
        problems += _place(where, found)
        sources.append(where)
        if not found:
            defaults = merge_defaults(defaults, own.raw.get("defaults") or {})
    rdma = tuple((chosen.get("allows") or {}).get("rdma") or ())
    result = RunProfile(
        dict(defaults),
        rdma,
        tuple(sources),
        tuple(problems),
        granted=find_granted(defaults).within(granted),
    )
    size = len(_pack(result, {}).encode(errors="replace"))
    if size > LONGEST_NOTE:
        what = f"{size} bytes are too many for the profiles of a run"
        why = f"its status keeps them, and has room for {LONGEST_NOTE}"
        remedy = (
            "Remove some defaults, or move long texts into a ConfigMap that a run mounts"
        )
        result = replace(result, problems=(Problem(result.text, what, why, remedy),))
    return result


def _pack(profile: RunProfile, own: Mapping[str, Any]) -> str:
    """Return the text that stores a profile in the status. ``own``: names that the installation does not
    grant."""
    content = {
        "defaults": profile.defaults,
        "rdma": profile.rdma,
        "own": own,
        "from": profile.sources,
    }
    kept = {key: value for key, value in content.items() if value}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@lru_cache(maxsize=4)
def parse_profiles(text: str) -> Mapping[str, Any]:
    """Return the profiles of the installation by name.

    Raises ValueError if the text is not a JSON object.
    """
    profiles = json.loads(text or "{}")
    if not isinstance(profiles, dict):
        raise ValueError("it is not a mapping of names to profiles")
    # In a Helm chart, a null value removes an inherited value.
    return {str(name): value for name, value in profiles.items() if value is not None}


def _check_own(own: NamespaceProfile, rules: Installation) -> tuple[Problem, ...]:
    """Return every problem of a namespace's profile, with paths relative to the profile."""
    found = own.problems
    if not found and not own.is_checked:
        found = check_profile(own.raw, of_namespace=True)
    if found:
        return found
    # Check the installation's rules here. If they were checked only with the run, the profile would count as
    # resolved and a later correction would have no effect.
    beyond = find_beyond(get_map(own.raw, "defaults"), rules)
    return tuple(
        replace(one, path=f"defaults{one.path.removeprefix('spec')}") for one in beyond
    )


def _place(where: str, problems: tuple[Problem, ...]) -> list[Problem]:
    """Return the problems with the name of the profile added to each path."""
    return [
        replace(one, path=f"{where}: {one.path}" if one.path else where) for one in problems
    ]

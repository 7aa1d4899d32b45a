"""The profile of a run: which one it has, resolved once when it begins, and how its status keeps it. Pure.

A run has a profile of the installation (``spec.profile``, or ``default``), the one of its namespace over it,
and its own words over both. The result is noted in the status. An edit of a profile therefore never reaches
a run that has begun, until a new ``restartNonce`` starts it again.
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
"""Most bytes of a resolved profile in a status, which has 16 KiB altogether. Names that are noted once more,
as the namespace's own, are not counted: they are a part of these."""
_OF_NAMESPACE: Final = "ConfigMap "
"""Beginning of the name of a namespace's profile; no profile of the installation has a blank in its name."""
UNSETTLED: Final = "unsettled"
"""Note of a run whose profile is wrong, or could not be read: it is looked at again in each pass."""


@dataclass(frozen=True)
class RunProfile:
    """The profile of one run.

    ``defaults``: of all profiles together. ``rdma``: resources of RDMA devices that are allowed. ``granted``:
    images and priority class of the defaults that the one of the installation names. ``sources``: what it was
    made of, for people, that of the installation first. ``is_known``: False for a run that began before there
    were profiles, to which nothing of them applies. ``is_read``: False where the API server did not give that
    of the namespace.
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
        """The text by which the status keeps it; empty for a run without profiles."""
        if self.problems or not self.is_read:
            return UNSETTLED
        if not self.is_known:
            return ""
        own: dict[str, Any] = {}
        if len(self.sources) > 1:
            # Few names are the namespace's. Alone, a profile of the installation grants all of its own.
            names = find_granted(self.defaults).without(self.granted)
            own = {
                "images": sorted(names.images),
                "priorityClasses": sorted(names.priority_classes),
            }
        return _pack(self, own)

    @property
    def text(self) -> str:
        """The profiles that were used, for people."""
        return ", ".join(self.sources)


NO_PROFILE: Final = RunProfile(is_known=False)
UNREAD_PROFILE: Final = RunProfile(is_known=False, is_read=False)


@dataclass(frozen=True)
class NamespaceProfile:
    """The profile that a namespace's ConfigMap holds. ``raw``: its content. ``problems``: why there is
    none. ``is_checked``: ``problems`` has all that is wrong with it by itself."""

    raw: Any = None
    problems: tuple[Problem, ...] = ()
    is_checked: bool = False


def find_kept(run: Mapping[str, Any], installation: str) -> RunProfile | None:
    """Return the profile that the run's status has; None where it is to be resolved now.

    ``installation``: the profiles of the installation, as JSON by name. A profile is resolved before the run
    begins, and again when a new ``restartNonce`` starts it anew.
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

        # Which of its names are the installation's: all but those that are noted as the namespace's own.
        names, own = find_granted(found.defaults), kept.get("own")
        first, *others = found.sources or ("",)
        if own is not None:
            images, classes = own.get("images", ()), own.get("priorityClasses", ())
            names = names.without(
                Granted(frozenset(map(str, images)), frozenset(map(str, classes)))
            )
        elif others or first.startswith(_OF_NAMESPACE):
            # Earlier versions did not note that: the installation's profile as it is now shows it.
            profile = get_map(parse_profiles(installation), first)
            names = names.within(find_granted(get_map(profile, "defaults")))
        return replace(found, granted=names)
    except (ValueError, TypeError, AttributeError, RecursionError):
        # Another writer has changed the status: what it said is unknown.
        return None


def resolve(
    run: Mapping[str, Any],
    installation: str,
    own: NamespaceProfile | None,
    rules: Installation = NOTHING_ALLOWED,
) -> RunProfile:
    """Resolve the profile of a run. ``installation``: the profiles of the installation, as JSON by name;
    ``own``: that of the namespace; ``rules``: the installation's, which hold for it, too."""
    namespace = get_text(get_map(run, "metadata"), "namespace") or "default"
    named = get_text(get_map(run, "spec"), "profile")
    known: dict[str, Any] = {}
    for name, profile in sorted(parse_profiles(installation).items()):
        namespaces = get_map({"profile": profile}, "profile").get("namespaces")
        # One that cannot be read counts as everybody's: its own check then refuses it to all.
        if not namespaces or not isinstance(namespaces, list) or namespace in namespaces:
            known[name] = profile

    # A run that names no profile has the default, if there is one for its namespace.
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
    """Return the note of a profile. ``own``: names in it that are not the installation's."""
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

    Raises ValueError for a text that is no JSON object.
    """
    profiles = json.loads(text or "{}")
    if not isinstance(profiles, dict):
        raise ValueError("it is no mapping of names to profiles")
    # A chart removes an inherited value by null.
    return {str(name): value for name, value in profiles.items() if value is not None}


def _check_own(own: NamespaceProfile, rules: Installation) -> tuple[Problem, ...]:
    """Return every problem of a namespace's profile, with paths inside of it."""
    found = own.problems
    if not found and not own.is_checked:
        found = check_profile(own.raw, of_namespace=True)
    if found:
        return found
    # Refused with the run alone, it would be settled, and no correction of it be seen.
    beyond = find_beyond(get_map(own.raw, "defaults"), rules)
    return tuple(
        replace(one, path=f"defaults{one.path.removeprefix('spec')}") for one in beyond
    )


def _place(where: str, problems: tuple[Problem, ...]) -> list[Problem]:
    """Return the problems with the name of whose file is wrong."""
    return [
        replace(one, path=f"{where}: {one.path}" if one.path else where) for one in problems
    ]

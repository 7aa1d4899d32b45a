"""Volumes of ``spec.template``, and the mounts of a pod's containers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from evergrad_common.contract import (
    OUR_MOUNTS,
    OUR_VOLUME_PREFIX,
    PROJECTED_KINDS,
    VOLUME_KINDS,
    hides_ours,
)
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.items import (
    Item,
    Keys,
    check_keys,
    check_unique,
    items_at,
    items_of,
)
from evergrad_manifest.model.raw import FieldPath, value_at
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import View
from evergrad_manifest.values.numbers import show
from evergrad_manifest.values.quantities import is_dns_label, is_dns_subdomain

TEMPLATE: Final = ("spec", "template")
ACCOUNT: Final = "spec.template.serviceAccountName"
SHORTEST_TOKEN_SECONDS: Final = 600
"""Minimum lifetime in seconds of a token that an API server issues."""
_MOUNT: Final = Keys(
    known=(
        "name",
        "mountPath",
        "subPath",
        "subPathExpr",
        "readOnly",
        "recursiveReadOnly",
        "mountPropagation",
    ),
    required=("name", "mountPath"),
    # Any other mode requires permissions that the pods of a run do not have.
    words={"mountPropagation": ("None", "HostToContainer")},
)
_TOKEN: Final = Keys(
    known=("path", "audience", "expirationSeconds"),
    required=("path",),
    kinds={"path": "text", "audience": "text", "expirationSeconds": "integer"},
)


def check_volumes(view: View) -> Iterator[Problem]:
    """Check that each volume has a name and a source, and that each mount names a volume and a unique
    path."""
    volumes = items_at(view, *TEMPLATE, "volumes")
    for path, volume in volumes:
        name, kinds = volume.get("name"), [key for key in volume if key != "name"]
        if not isinstance(name, str) or not is_dns_label(name):
            why = "a volume's name has lower-case letters, digits and '-'"
            yield Problem(
                format_path((*path, "name")),
                f"{show(name)} is not a valid name",
                why,
                "Correct it",
            )
        if len(kinds) != 1:
            what = (
                "has no source" if not kinds else f"has several sources: {', '.join(kinds)}"
            )
            remedy = "Give it exactly one, such as `emptyDir: {}` or `persistentVolumeClaim: {claimName: …}`"
            yield Problem(format_path(path), what, "a volume has exactly one", remedy)
        yield from _check_volume_kinds(path, volume, kinds)
    yield from check_unique(volumes, "name")
    yield from check_mounts(items_at(view, *TEMPLATE, "volumeMounts"), volumes)

    # A token requires a named service account: the installation allows accounts by their names.
    account = view.get(ACCOUNT)
    if isinstance(account, str) and not is_dns_subdomain(account):
        why = "the name of a service account has lower-case letters, digits, '-' and '.'"
        yield Problem(ACCOUNT, f"{show(account)} is not a valid name", why, "Correct it")
    for path, volume in volumes:
        inside = ("projected", "sources")
        for source_path, source in items_of((*path, *inside), value_at(volume, inside)):
            if "serviceAccountToken" not in source:
                continue
            token = (*source_path, "serviceAccountToken")
            yield from _check_token(token, source["serviceAccountToken"])
            # Without a name, it would be a token of the namespace's default account, which the installation
            # has not allowed.
            if not view.is_given(ACCOUNT):
                why = "a token belongs to an account that the installation allows"
                remedy = f"Add {ACCOUNT}, or remove this source"
                yield Problem(format_path(token), "names no account", why, remedy)


def check_mounts(mounts: Sequence[Item], volumes: Sequence[Item]) -> Iterator[Problem]:
    """Check that each mount names one of the ``volumes``, and a unique path that the run itself does not
    use."""
    yield from check_keys(mounts, _MOUNT)
    yield from check_unique(mounts, "mountPath")

    # Compare names and mounts with each other, and with the mounts of the run itself.
    names = dict.fromkeys(str(volume.get("name")) for _, volume in volumes)
    for path, mount in mounts:
        if (
            isinstance(mount.get("name"), str)
            and mount["name"]
            and mount["name"] not in names
        ):
            remedy = (
                f"Add it there, or use one of: {', '.join(names)}"
                if names
                else "Add it there"
            )
            what = f"{show(mount['name'])} is not the name of a volume under spec.template.volumes"
            yield Problem(format_path((*path, "name")), what, "", remedy)
        place = mount.get("mountPath")
        if (
            isinstance(place, str)
            and place
            and (not place.startswith("/") or ":" in place or ".." in place.split("/"))
        ):
            why = "a mount path is absolute, without ':' and '..'"
            yield Problem(
                format_path((*path, "mountPath")),
                f"{show(place)} cannot be mounted on",
                why,
                "Correct it",
            )
        elif isinstance(place, str) and hides_ours(place):
            why = f"the run itself mounts {', '.join(OUR_MOUNTS)}"
            yield Problem(
                format_path((*path, "mountPath")),
                f"{show(place)} is reserved",
                why,
                "Choose another place",
            )


def _check_volume_kinds(
    path: FieldPath, volume: Mapping[str, Any], kinds: Sequence[str]
) -> Iterator[Problem]:
    name, allowed = volume.get("name"), f"Allowed here: {', '.join(VOLUME_KINDS)}"
    if isinstance(name, str) and name.startswith(OUR_VOLUME_PREFIX):
        yield Problem(
            format_path((*path, "name")),
            f"the prefix {OUR_VOLUME_PREFIX} is reserved",
            "the run's own volumes use it",
            "Rename it",
        )
    for kind in kinds:
        if kind not in VOLUME_KINDS:
            near = nearest(kind, VOLUME_KINDS)
            why = (
                f"did you mean `{near}`? {allowed}"
                if near
                else "it gives access to more than a pod of a run may use"
            )
            yield Problem(
                format_path((*path, kind)),
                "not a volume that a run may have",
                why,
                "" if near else f"Use another. {allowed}",
            )

    # A projected volume must not provide a source that is refused as a volume.
    sources = value_at(volume, ("projected", "sources"))
    for index, source in enumerate(sources if isinstance(sources, list | tuple) else ()):
        for kind in source if isinstance(source, Mapping) else ():
            if kind not in PROJECTED_KINDS:
                where = format_path((*path, "projected", "sources", index, kind))
                yield Problem(
                    where,
                    "not allowed here",
                    "",
                    f"Remove it. Allowed here: {', '.join(PROJECTED_KINDS)}",
                )


def _check_token(path: FieldPath, token: Any) -> Iterator[Problem]:
    if not isinstance(token, Mapping):
        why = f"a mapping is needed with keys such as {', '.join(_TOKEN.known)}"
        yield Problem(
            format_path(path), f"{show(token)} is not a mapping", why, "Correct it"
        )
        return
    yield from check_keys([(path, token)], _TOKEN)
    seconds, file = token.get("expirationSeconds"), token.get("path")
    if isinstance(seconds, int) and seconds < SHORTEST_TOKEN_SECONDS:
        where = format_path((*path, "expirationSeconds"))
        why = f"the smallest value allowed is {SHORTEST_TOKEN_SECONDS}"
        remedy = f"Use {SHORTEST_TOKEN_SECONDS} or more"
        yield Problem(where, f"{show(seconds)} is too small", why, remedy)
    if isinstance(file, str) and (file.startswith("/") or ".." in file.split("/")):
        where, why = (
            format_path((*path, "path")),
            "it is relative to the volume and has no '..'",
        )
        yield Problem(where, f"{show(file)} is not a file in the volume", why, "Correct it")


RULES: Final = (check_volumes,)

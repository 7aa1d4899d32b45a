"""What a run must not say: the second door behind the CRD's, should that be of another version."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from evergrad_coordinator.contract import (
    LABEL_PREFIX,
    OUR_MOUNTS,
    OUR_VARIABLE_PREFIXES,
    OUR_VARIABLES,
    OUR_VOLUME_PREFIX,
    PROJECTED_KINDS,
    VOLUME_KINDS,
    hides_ours,
)
from evergrad_operator import names
from evergrad_operator.raw import get_map, get_maps
from evergrad_operator.spec import Template, TrainingRun

MAX_SPEC_BYTES: Final = 700_000


def find_problems(run: TrainingRun, raw: Mapping[str, Any]) -> list[str]:
    """All that is not allowed, each with its path and what to do; empty for a run that may be started. ``raw``: the same run."""
    template, found = run.spec.template, []
    found += [f"{where}: {what}" for where, what in _find_volume_problems(template)]
    found += [f"{where}: {what}" for where, what in _find_mount_problems(template)]
    found += [f"{where}: {what}" for where, what in _find_variable_problems(template)]
    for kind, values in (("labels", template.labels), ("annotations", template.annotations)):
        found += [
            f"spec.template.{kind}: {key} is reserved. Remove it"
            for key in values
            if key.startswith(LABEL_PREFIX)
        ]
    parts = run.volume_path.split("/")
    if ".." in parts or not run.volume_path or (run.spec.storage.path or "").startswith("/"):
        found.append(
            f"spec.storage.path: {run.volume_path[:100]!r} leaves the volume. Write a path such as runs/first"
        )
    if len(run.name) > names.LONGEST_RUN_NAME:
        found.append(
            f"metadata.name: {len(run.name)} characters; its pods need room. Use {names.LONGEST_RUN_NAME} at most"
        )
    if len(json.dumps(get_map(raw, "spec"), ensure_ascii=False, default=dict).encode()) > MAX_SPEC_BYTES:
        found.append(
            f"spec: more than {MAX_SPEC_BYTES} bytes, which no ConfigMap holds. Move lists and texts into files"
        )
    return found


def _find_volume_problems(template: Template) -> Iterator[tuple[str, str]]:
    for place, volume in enumerate(template.volumes):
        where = f"spec.template.volumes[{place}]"
        kinds = [key for key in volume if key != "name"]
        if len(kinds) != 1 or kinds[0] not in VOLUME_KINDS:
            yield (
                where,
                f"{', '.join(map(str, kinds)) or 'nothing'} is not one of {', '.join(VOLUME_KINDS)}. Use one of these",
            )
        if str(volume.get("name") or "").startswith(OUR_VOLUME_PREFIX):
            yield where, f"the prefix {OUR_VOLUME_PREFIX} is reserved. Rename the volume"
        for source in get_maps(get_map(volume, "projected"), "sources"):
            wrong = [str(kind) for kind in source if kind not in PROJECTED_KINDS]
            if wrong:
                yield (
                    where,
                    f"{', '.join(wrong)} is not allowed: the pods of a run talk to no API server. Remove it",
                )


def _find_mount_problems(template: Template) -> Iterator[tuple[str, str]]:
    for place, mount in enumerate(template.volume_mounts):
        where, path = f"spec.template.volumeMounts[{place}]", str(mount.get("mountPath") or "")
        if not path.startswith("/") or ".." in path.split("/") or hides_ours(path):
            yield (
                where,
                f"{path[:100]!r} is no place for a mount: it is absolute, and not in {', '.join(OUR_MOUNTS)}. Choose another",
            )
        if mount.get("mountPropagation") not in (None, "None", "HostToContainer"):
            yield where, "mountPropagation needs rights that the pods of a run do not have. Remove it"
        if str(mount.get("name") or "").startswith(OUR_VOLUME_PREFIX):
            yield (
                where,
                f"the prefix {OUR_VOLUME_PREFIX} is reserved. Mount a volume of spec.template.volumes",
            )


def _find_variable_problems(template: Template) -> Iterator[tuple[str, str]]:
    for place, variable in enumerate(template.env):
        name = str(variable.get("name") or "")
        if name in OUR_VARIABLES or name.startswith(OUR_VARIABLE_PREFIXES):
            yield (
                f"spec.template.env[{place}]",
                f"{name} is reserved: the run sets it for each process. Remove it",
            )

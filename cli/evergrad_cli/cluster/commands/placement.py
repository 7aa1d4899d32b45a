"""Finds paths that can work on this machine but not in a pod: relative paths, and paths without a mount.

Pure.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final, get_args

from evergrad_common.contract import VOLUME_PATH
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section

_VALIDATOR: Final = get_args(LocalPath)[1]
_WHY: Final = "there is no folder of the file in a pod"


def placement_problems(run: TrainingRun) -> list[Problem]:
    """Return a problem for each path of ``run`` that cannot exist in a pod."""
    problems = [
        _relative(path, value)
        for path, value in local_paths(run)
        if not PurePosixPath(value).is_absolute()
    ]
    script = run.spec.script
    if script is None:
        return problems

    # Check only the words of a script that are certain to be paths; other words have a meaning only to the
    # script. The default folder, a dot, is allowed: a module or an executable of the image can start
    # anywhere.
    folder, program = script.working_directory, script.program
    if folder != "." and not PurePosixPath(folder).is_absolute():
        problems.append(_relative("spec.script.workingDirectory", folder))
    is_path = program.kind == "file" or (
        program.kind == "executable" and "/" in program.name
    )
    if is_path and not PurePosixPath(program.name).is_absolute():
        problems.append(_relative("spec.script.command[0]", program.name))
    return problems


def placement_warnings(run: TrainingRun) -> list[Problem]:
    """Return a problem for each path without a mount if the image is the stock image, which contains no
    data."""
    if run.spec.image is not None:
        return []

    # Warn and do not refuse: a claim may contain its own folders, which this machine cannot read.
    mounts = [
        VOLUME_PATH,
        *(str(mount.get("mountPath", "")) for mount in run.spec.template.volume_mounts),
    ]
    return [
        Problem(
            path,
            f"nothing is mounted at {value}",
            "the stock image holds no data",
            (
                f"Put it on the run's volume ({VOLUME_PATH}/…), mount it by spec.template, or name "
                "an image with it in spec.image"
            ),
        )
        for path, value in local_paths(run)
        if PurePosixPath(value).is_absolute()
        and not any(PurePosixPath(value).is_relative_to(mount) for mount in mounts if mount)
    ]


def local_paths(run: TrainingRun) -> Iterator[tuple[str, str]]:
    """Yield field and value of each path that a pod reads, except the words of a script."""
    if run.spec.training is not None:
        yield from _paths_in(run.spec.training, "spec.training")


def _paths_in(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in type(section).model_fields.items():
        value, key = getattr(section, name), info.alias or name
        if isinstance(value, Section):
            yield from _paths_in(value, f"{prefix}.{key}")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    yield from _paths_in(item, f"{prefix}.{key}[{index}]")
        elif isinstance(value, str):
            # pydantic keeps the mark at the field, or in one branch of `LocalPath | None`.
            members = [get_args(member) for member in get_args(info.annotation)]
            if any(_VALIDATOR in marks for marks in (info.metadata, *members)):
                yield f"{prefix}.{key}", value


def _relative(path: str, value: str) -> Problem:
    remedy = (
        f"Write where the pods find it: on the run's volume ({VOLUME_PATH}/…), or at a mount of "
        "spec.template.volumeMounts"
    )
    return Problem(path, f"{value} is a relative path", _WHY, remedy)

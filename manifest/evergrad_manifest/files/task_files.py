"""Finds the Python files of a user's own task, next to the manifest or in it, or the package that offers it.

``recipe: module:attr`` names a file next to the manifest. For example, ``recipe: tasks.echo:Echo`` names
``tasks/echo.py``. On a cluster, ``spec.training.files`` carries the files: ``evergrad submit`` fills it, and
each node writes them next to the run.

If there is no such file, an installed package can offer a recipe of this name, by an entry point of the group
``evergrad.recipes``.
"""

import hashlib
import json
import os
import secrets
from importlib import metadata
from pathlib import Path
from typing import Final

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.files.sources import find_sources, hash_each, hash_sources
from evergrad_manifest.training import RECIPES, Training
from evergrad_manifest.training.own_task import MOST_FILE_BYTES

RECIPE_GROUP: Final = "evergrad.recipes"
"""Group of the entry points with which packages offer recipes. The name of an entry point is the name in
``spec.training.recipe``, and its value is the class of the task."""
_FIELD = "spec.training.recipe"


def find_offers(recipe: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points with which installed packages offer ``recipe``: one for each package."""
    return tuple(metadata.entry_points(group=RECIPE_GROUP, name=recipe))


def task_folder(training: Training, base_directory: Path) -> Path:
    """Return the folder of the task's files: the manifest's folder, or a folder below it named by content."""
    if not training.files:
        return base_directory
    content = json.dumps(dict(training.files), sort_keys=True).encode()
    return base_directory / f".task-{hashlib.sha256(content).hexdigest()[:16]}"


def task_path(training: Training, base_directory: Path) -> Path | None:
    """Return the file that the recipe names, even if it does not exist; None for a recipe of ours or of a
    package.

    A file takes precedence over a package, so that installing a package never changes what a manifest trains.
    """
    if training.recipe in RECIPES:
        return None
    module = task_folder(training, base_directory).joinpath(
        *training.recipe.partition(":")[0].split(".")
    )
    package = module / "__init__.py"
    path = package if package.is_file() else module.with_name(f"{module.name}.py")
    is_file = bool(training.files) or path.is_file()
    return None if not is_file and find_offers(training.recipe) else path


def task_problems(training: Training, *, base_directory: Path) -> list[Problem]:
    """Return the problem if the task's file cannot be read here; empty if it can."""
    path = task_path(training, base_directory)
    # A rule of the manifest checks files that the run carries, without a folder.
    if path is None or training.files or path.is_file():
        return []
    module = training.recipe.partition(":")[0]
    what, why = f"the module {module} was not found", f"there is no {path}"
    return [
        Problem(_FIELD, what, why, "Put the file next to the manifest, or correct its name")
    ]


def collect_task(training: Training, base_directory: Path) -> dict[str, str]:
    """Return the task's file and the modules next to it that it imports, for ``spec.training.files``.

    Empty for recipes of ours and of packages. Raises ConfigurationError if files are missing, too large, or
    not text.
    """
    path = task_path(training, base_directory)
    if path is None or training.files:
        return dict(training.files)
    raise_if(task_problems(training, base_directory=base_directory), ConfigurationError)
    try:
        files = {
            Path(name).as_posix(): file.read_text("utf-8")
            for name, file in find_sources([path], base_directory).items()
        }
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Check the files next to the manifest"
        raise ConfigurationError(
            Problem(_FIELD, "cannot be read", str(error), remedy)
        ) from error

    # Refuse the files here, where their names are known: the API server would only report that the object
    # is too large.
    size = sum(len(text.encode()) for text in files.values())
    if size > MOST_FILE_BYTES:
        what = f"{', '.join(files)} are {size:,} bytes together"
        why = f"a run carries at most {MOST_FILE_BYTES:,}"
        raise ConfigurationError(
            Problem(
                _FIELD,
                what,
                why,
                "Put them on the run's volume, in the run's directory, or in the image",
            )
        )
    return files


def hash_task(training: Training, base_directory: Path) -> str:
    """Return a hash of the task's file and the modules next to it that it imports; empty for our recipes.

    For a recipe of a package, the hash is of the package's name and version. Writes the files first if the
    manifest carries them.
    """
    if training.recipe in RECIPES:
        return ""
    # Only files on the disk show whether the module is a file or a package.
    write_task(training, base_directory)
    path = task_path(training, base_directory)
    if path is not None:
        return hash_sources([path], task_folder(training, base_directory))
    offers = [
        (one.name, one.value, one.dist.name, one.dist.version)
        for one in find_offers(training.recipe)
        if one.dist is not None
    ]
    return hashlib.sha256(json.dumps(sorted(offers)).encode()).hexdigest()[:16]


def hash_task_files(training: Training, base_directory: Path) -> dict[str, str]:
    """Return a hash for each file: 16 hex digits by its path in the task's folder; empty for recipes of ours
    and of packages."""
    write_task(training, base_directory)
    path = task_path(training, base_directory)
    if path is None:
        return {}
    each = hash_each([path], task_folder(training, base_directory))
    return {name: own[:16] for name, own in each.items()}


def write_task(training: Training, base_directory: Path) -> None:
    """Write the files that the manifest carries.

    Several nodes may do this at the same time, because all write the same content.
    """
    folder = task_folder(training, base_directory)
    for name, text in training.files.items():
        path, content = folder / name, text.encode()
        # Compare the content: after a power loss, a file may have its name but not its text.
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write to another name and rename, because another node may be reading the file.
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        unfinished.write_bytes(content)
        os.replace(unfinished, path)

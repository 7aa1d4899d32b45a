"""The choice of the recipe, and the options and files of a custom task."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import FieldValueError
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import RECIPES, TRAINING
from evergrad_manifest.values.numbers import show

_OWN_TASK: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_FILE_NAME: Final = re.compile(r"([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py", re.ASCII)
LONGEST_FILE_NAME: Final = 200
"""Most characters of a file's name with its folders. File systems allow more for one part of a path, so the
temporary name of a file that is being written fits, too."""
MOST_FILE_BYTES: Final = 256 * 1024
"""Most bytes of all files together. They are stored in the run's object and in its ConfigMap, which hold 1
MiB."""


def check_recipe(recipe: str) -> str:
    """Return ``recipe``. Raises FieldValueError if it is neither the name of a recipe nor ``module:attr``."""
    if recipe in RECIPES or _OWN_TASK.fullmatch(recipe):
        return recipe
    remedy = "Write module:attr, such as my_task:Task for the class Task of my_task.py"
    if "/" in recipe or ".py:" in recipe:
        module = recipe.rpartition("/")[2].replace(".py:", ":")
        remedy = (
            f"Write {module} for a file next to this one"
            if _OWN_TASK.fullmatch(module)
            else remedy
        )
    why = f"it is one of {', '.join(RECIPES)}, or a task of your own as module:attr"
    raise FieldValueError(f"{show(recipe)} is not a recipe", why, remedy)


def check_options(view: View) -> Iterator[Problem]:
    """Check that only a custom task has options. A named recipe has fields instead."""
    recipe, options = view.get(f"{TRAINING}.recipe"), view.get(f"{TRAINING}.options")
    if recipe in RECIPES and options is not UNKNOWN and options:
        what = f"have no meaning with recipe {recipe}"
        why = "they are those of a task of your own"
        yield Problem(
            f"{TRAINING}.options", what, why, "Remove them, or set recipe: module:attr"
        )


def check_files(view: View) -> Iterator[Problem]:
    """Check that only a custom task has files, and that the files are below one folder."""
    recipe, files = view.get(f"{TRAINING}.recipe"), view.get(f"{TRAINING}.files")
    if not isinstance(files, Mapping) or not files:
        return
    if recipe in RECIPES:
        what = f"have no meaning with recipe {recipe}"
        why = "they are those of a task of your own"
        yield Problem(
            f"{TRAINING}.files", what, why, "Remove them, or set recipe: module:attr"
        )
    for name in files:
        if len(str(name)) > LONGEST_FILE_NAME:
            why = f"at most {LONGEST_FILE_NAME} characters are allowed"
            yield Problem(
                f"{TRAINING}.files", f"{show(name)} is too long", why, "Rename it"
            )
        elif not _FILE_NAME.fullmatch(str(name)):
            why = "a name is a relative path of a Python module, such as task.py or parts/loss.py"
            yield Problem(
                f"{TRAINING}.files",
                f"{show(name)} cannot be a file's name",
                why,
                "Rename it",
            )

    # A missing file would be noticed only by the first pod.
    if recipe not in (*RECIPES, UNKNOWN):
        stem = recipe.partition(":")[0].replace(".", "/")
        if not {f"{stem}.py", f"{stem}/__init__.py"} & {*files}:
            remedy = "Add it, or correct the name of the module"
            yield Problem(
                f"{TRAINING}.files", f"{stem}.py is not among the files", "", remedy
            )


RULES: Final = (check_options, check_files)

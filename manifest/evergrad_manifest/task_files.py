"""Where the Python file of a task of the user's own lies: ``recipe: module:attr`` names it beside the
manifest."""

from pathlib import Path

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import RECIPES, Training

_FIELD = "spec.training.recipe"


def task_path(recipe: str, base_directory: Path) -> Path | None:
    """The file that ``recipe`` names, whether or not it is there; None for a recipe that has a
    name of ours."""
    if recipe in RECIPES:
        return None
    module = base_directory.joinpath(*recipe.partition(":")[0].split("."))
    package = module / "__init__.py"
    return package if package.is_file() else module.with_name(f"{module.name}.py")


def task_problems(training: Training, *, base_directory: Path) -> list[Problem]:
    """Why the task's file cannot be read here."""
    path = task_path(training.recipe, base_directory)
    if path is None or path.is_file():
        return []
    module = training.recipe.partition(":")[0]
    what = f"the module {module} was not found"
    why = f"there is no {path}"
    return [Problem(_FIELD, what, why, "Put the file beside the manifest, or correct its name")]

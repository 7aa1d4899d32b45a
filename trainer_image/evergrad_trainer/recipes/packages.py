"""Loads the recipes that separate packages offer, by entry points of the group ``evergrad.recipes``."""

import importlib
import inspect
from pathlib import Path
from typing import Final

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.files.task_files import find_offers
from evergrad_manifest.training import RECIPES, Training
from evergrad_trainer.recipes.user_task import Code, check_made, make_task
from evergrad_trainer.task import Task

_RECIPE: Final = "spec.training.recipe"
_SEPARATE: Final = {"latent_edit": ("evergrad-latent-edit", "./latent_edit")}
"""Recipes of Evergrad that are separate packages: the name of the package, and its folder in a clone."""


def load_offered(
    training: Training,
    base_directory: Path,
    *,
    has_trained: bool = False,
    run_directory: Path | None = None,
) -> tuple[Task, Code]:
    """Load the recipe that an installed package offers under the name in ``spec.training.recipe``.

    The arguments are those of ``load_task``. Raises ConfigurationError if no package offers the recipe, if
    several packages offer it, or if the offered object is not a task; TaskInputError or TaskError if its code
    fails.
    """
    recipe = training.recipe
    offers = find_offers(recipe)
    if not offers:
        name, folder = _SEPARATE[recipe]
        what = f"{recipe} needs the Python package {name}"
        why = "this recipe is a separate package, and it is not installed here"
        remedy = f"Install it, in a clone of Evergrad: pip install {folder}"
        raise ConfigurationError(Problem(_RECIPE, what, why, remedy))
    names = [one.value if one.dist is None else one.dist.name for one in offers]
    if len(offers) > 1:
        what = f"{recipe} is offered by the packages {', '.join(sorted(names))}"
        why = "a run has one recipe"
        raise ConfigurationError(
            Problem(_RECIPE, what, why, "Uninstall all of them but one")
        )

    made = offers[0].load()
    check_made(made, f"{offers[0].value} is no task of the package {names[0]}")
    # Errors in a recipe of ours are not errors of a user's code.
    module = importlib.import_module(offers[0].module)
    is_ours = recipe in RECIPES
    code = Code(
        None if is_ours else Path(inspect.getfile(module)).parent, has_trained=has_trained
    )
    return make_task(made, training, base_directory, code, run_directory), code

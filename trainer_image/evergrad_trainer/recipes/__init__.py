"""Recipes: what is trained, one folder or package per recipe. Only this package refers to recipes by name."""

from pathlib import Path

from evergrad_manifest.files.task_files import task_path
from evergrad_manifest.training import Training
from evergrad_trainer.recipes.packages import load_offered
from evergrad_trainer.recipes.preference import Preference
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.recipes.sft import Sft
from evergrad_trainer.recipes.two_stage_kl import TwoStageKl
from evergrad_trainer.recipes.user_task import Code, load_own
from evergrad_trainer.task import Setup, Task

__all__ = ["RECIPES", "load_task"]

RECIPES: dict[str, type[Task]] = {
    "pretrain": Pretrain,
    "sft": Sft,
    "two_stage_kl": TwoStageKl,
    "preference": Preference,
}
"""Tasks of this package by the value of ``spec.training.recipe``. Any other value names a recipe of a
separate package, or a user's task."""


def load_task(
    training: Training,
    base_directory: Path,
    *,
    has_trained: bool = False,
    run_directory: Path | None = None,
) -> tuple[Task, Code]:
    """Load the task that ``spec.training.recipe`` names, with its options.

    Also returns the object that adds places in the task's code to errors. ``has_trained``: the run has made
    steps. ``run_directory``: as in ``Setup``.
    """
    recipe = RECIPES.get(training.recipe)
    if recipe is None:
        # A package offers the recipe if there is no file of its name.
        is_offered = task_path(training, base_directory) is None
        load = load_offered if is_offered else load_own
        return load(
            training, base_directory, has_trained=has_trained, run_directory=run_directory
        )
    # The built-in recipes take no options, because sections of the file contain all their settings.
    options = recipe.Options()
    task = recipe(Setup(training, options, base_directory, run_directory))
    return task, Code(None)

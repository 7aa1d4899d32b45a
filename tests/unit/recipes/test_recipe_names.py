"""Names of recipes: each is a separate task, with the sections that a file may contain for it."""

import re
from importlib import metadata
from pathlib import Path

import pytest

import evergrad_trainer
from evergrad_manifest.files.task_files import RECIPE_GROUP
from evergrad_manifest.training import RECIPES as NAMES
from evergrad_trainer.recipes import RECIPES

PACKAGE = Path(evergrad_trainer.__file__).parent
SECTIONS = ("twoStageKl", "latentEdit")
"""Sections of the file that have a recipe's name in the other spelling."""


@pytest.mark.capability("A-1")
def test_each_recipe_name_of_a_manifest_has_its_own_task() -> None:
    separate = {one.name: one.load() for one in metadata.entry_points(group=RECIPE_GROUP)}
    assert (*RECIPES, *separate) == NAMES
    assert len({*RECIPES.values(), *separate.values()}) == len(NAMES) == 5


def test_no_recipe_name_is_used_outside_the_recipes_folder() -> None:
    """They occur neither in the loop, the step, the worker or the checkpoint, nor elsewhere in the trainer:
    not as an import, a text, a field of the file or a word of a comment."""
    name = re.compile(rf"\b({'|'.join((*NAMES, *SECTIONS))})\b")
    modules = [
        one for one in PACKAGE.rglob("*.py") if PACKAGE / "recipes" not in one.parents
    ]
    folders = {one.relative_to(PACKAGE).parts[0] for one in modules}
    assert folders >= {"training", "worker", "checkpoint", "state", "data", "task.py"}
    found = [
        f"{one.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for one in modules
        for number, line in enumerate(one.read_text("utf-8").splitlines(), start=1)
        if name.search(line)
    ]
    assert found == []

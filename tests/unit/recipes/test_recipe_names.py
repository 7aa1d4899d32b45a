"""Names of recipes: each is a task of its own, with the sections that the file may have beside it."""

import pytest

from evergrad_manifest.training import RECIPES as NAMES
from evergrad_trainer.recipes import RECIPES


@pytest.mark.capability("A-1")
def test_each_name_that_a_file_may_have_is_a_task_of_its_own() -> None:
    assert tuple(RECIPES) == NAMES
    assert len(set(RECIPES.values())) == len(NAMES) == 5

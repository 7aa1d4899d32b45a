"""Recipes of separate packages: found by their entry points, and refused with the remedy."""

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import latent_corpus
import pytest

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.files.task_files import (
    RECIPE_GROUP,
    collect_task,
    hash_task,
    hash_task_files,
    task_problems,
)
from evergrad_manifest.training import Training
from evergrad_trainer.preflight.checks import _check_task
from evergrad_trainer.recipes import load_task

TASK = """
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import Section


class Options(Section):
    share: float = 0.15


class Masked(Pretrain):
    Options = Options

    def __init__(self, setup):
        super().__init__(setup)
        self.share = 1 / setup.options.share


Nothing = 7
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package that offers ``genomics:Masked``, as pip would: a module and its metadata."""
    site = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])

    def write(
        name: str = "genomics-recipes",
        value: str = "genomics_recipes:Masked",
        version: str = "1.0",
    ) -> None:
        module = value.partition(":")[0]
        folder = site / f"{name.replace('-', '_')}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (site / f"{module}.py").write_text(TASK, "utf-8")
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", "utf-8")
        (folder / "entry_points.txt").write_text(
            f"[{RECIPE_GROUP}]\ngenomics:Masked = {value}\n", "utf-8"
        )
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, module, raising=False)

    return write


def training(recipe: str = "genomics:Masked", **options: float) -> Training:
    return Training.model_validate(
        {
            "recipe": recipe,
            "options": options,
            "batching": {"globalBatchSize": 4, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 3},
        }
    )


def test_a_package_offers_a_recipe_with_its_own_options(
    install: Install, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="the module genomics was not found"):
        load_task(training(), tmp_path)
    install()
    task, code = load_task(training(share=0.5), tmp_path)
    assert type(task).__module__ == "genomics_recipes" and code.is_own
    assert getattr(task, "share", None) == 2
    with pytest.raises(ConfigurationError, match=r"spec\.training\.options\.shear"):
        load_task(training(shear=0.5), tmp_path)


def test_a_recipe_of_a_package_carries_no_files_and_its_hash_is_of_its_version(
    install: Install, tmp_path: Path
) -> None:
    install()
    assert task_problems(training(), base_directory=tmp_path) == []
    assert collect_task(training(), tmp_path) == hash_task_files(training(), tmp_path) == {}
    first = hash_task(training(), tmp_path)
    assert first == hash_task(training(share=0.5), tmp_path) and len(first) == 16
    install(version="1.1")
    assert hash_task(training(), tmp_path) != first


def test_a_file_beside_the_manifest_takes_precedence_over_a_package(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "genomics.py").write_text(TASK, "utf-8")
    alone = hash_task(training(), tmp_path)
    install()
    assert hash_task(training(), tmp_path) == alone
    assert set(collect_task(training(), tmp_path)) == {"genomics.py"}
    task, _ = load_task(training(), tmp_path)
    assert type(task).__module__ == "genomics"
    monkeypatch.delitem(sys.modules, "genomics")


def test_a_recipe_that_two_packages_offer_is_refused_with_both_names(
    install: Install, tmp_path: Path
) -> None:
    install()
    install("other-recipes", "other_recipes:Masked")
    with pytest.raises(
        ConfigurationError,
        match=r"genomics:Masked is offered by the packages genomics-recipes, other-recipes; .* Uninstall",
    ):
        load_task(training(), tmp_path)


def test_an_offered_object_that_is_no_task_is_refused(
    install: Install, tmp_path: Path
) -> None:
    install(value="genomics_recipes:Nothing")
    with pytest.raises(
        ConfigurationError,
        match=r"genomics_recipes:Nothing is no task of the package genomics-recipes; it has no loss",
    ):
        load_task(training(), tmp_path)


def test_a_recipe_of_ours_without_its_package_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = Training.model_validate(latent_corpus.training())
    assert hash_task(edits, tmp_path) == ""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(ConfigurationError) as refused:
        load_task(edits, tmp_path)
    (problem,) = refused.value.problems
    assert str(problem) == (
        "spec.training.recipe: latent_edit needs the Python package evergrad-latent-edit; "
        "this recipe is a separate package, and it is not installed here. "
        "Install it, in a clone of Evergrad: pip install ./latent_edit."
    )
    # Preflight reports it with the other problems of the file, and its identity needs no package.
    assert _check_task(edits, tmp_path) == refused.value.problems
    assert hash_task(edits, tmp_path) == ""

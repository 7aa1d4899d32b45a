"""Fixtures for tests with processes of real runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Any]:
    """Return a new directory with documents and the manifest of the tiny run."""
    import run_helpers

    one = run_helpers.Experiment(tmp_path)
    run_helpers.write_documents(tmp_path / "documents.jsonl")
    one.write()
    yield one
    one.close()


@pytest.fixture(scope="module")
def make_experiment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[], Any]]:
    """Return a factory of directories that the tests of one module share."""
    import run_helpers

    made: list[Any] = []

    def make() -> Any:
        one = run_helpers.Experiment(tmp_path_factory.mktemp("experiment"))
        run_helpers.write_documents(one.path / "documents.jsonl")
        one.write()
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a factory that starts a coordinator. All processes of its cluster end with the test."""
    import rendezvous_cluster

    made: list[Any] = []

    def make(*arguments: str, **options: Any) -> Any:
        one = rendezvous_cluster.Cluster(
            tmp_path / f"cluster-{len(made)}", *arguments, **options
        )
        made.append(one)
        one.start_coordinator()
        return one

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the experiment of the elastic tests.

    One undisturbed process has trained its run directory ``undisturbed``.
    """
    import elastic_helpers
    import run_helpers

    one = run_helpers.Experiment(tmp_path_factory.mktemp("elastic"))
    run_helpers.write_documents(one.path / "documents.jsonl")
    one.write(elastic_helpers.elastic_recipe())
    elastic_helpers.train_undisturbed(one)
    yield one
    one.close()


@pytest.fixture(scope="session")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return a function that returns a recipe's experiment, which is created once.

    One undisturbed process has trained its run directory ``undisturbed``.
    """
    import elastic_helpers
    import recipe_runs
    import run_helpers

    made: dict[str, Any] = {}

    def find(recipe: str) -> Any:
        if recipe not in made:
            made[recipe] = one = run_helpers.Experiment(tmp_path_factory.mktemp(recipe))
            recipe_runs.write_recipe(one, recipe)
            elastic_helpers.train_undisturbed(one)
        return made[recipe]

    yield find
    for one in made.values():
        one.close()


@pytest.fixture
def make_elastic(undisturbed: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a factory of clusters that are not started yet. Their processes end with the test."""
    import elastic_helpers

    made: list[Any] = []

    def make(experiment: Any = None, **options: Any) -> Any:
        path = tmp_path / f"elastic-{len(made)}"
        path.mkdir()
        made.append(elastic_helpers.Cluster(experiment or undisturbed, path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()

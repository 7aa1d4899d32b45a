"""Errors that only the data show: `evergrad run` exits with 64 and reports the place, creates nothing in a
new directory, and leaves all files of an existing run unchanged."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from latent_corpus import bases, edit_row, seal, write_lines
from recipe_runs import TRAINING, write_recipe
from run_helpers import STOPPED_SAVED, USER_ERROR, Experiment, merge, read_lines

from evergrad_cli.main import main

WINDOWS, POPULATION = "corpus/placed/train.jsonl", "corpus/gnomad/train.jsonl"
Damage = Callable[[Path], None]
Begun = Callable[[str], Experiment]


@dataclass(frozen=True)
class Case:
    """One kind of invalid input, and its message for a run that has not begun."""

    name: str
    shows: tuple[str, ...]
    said: tuple[str, ...]
    damage: Damage = lambda _: None
    recipe: str = "pretrain"
    changes: Mapping[str, Any] = field(default_factory=dict)


def text(name: str, content: str | bytes) -> Damage:
    """Change the content of a file; the manifest of a corpus is updated."""

    def damage(folder: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
        if name.startswith("corpus/"):
            seal(folder / "corpus")

    return damage


def without(name: str) -> Damage:
    """A file is missing."""
    return lambda folder: (folder / name).unlink()


def manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Another manifest of the corpus."""

    def edit(raw: dict[str, Any]) -> None:
        change(raw)

    return lambda folder: seal(folder / "corpus", edit) and None


def population(**values: Any) -> Damage:
    """Write only one population edit, with these values instead of its own."""

    def damage(folder: Path) -> None:
        genome = read_lines(folder / WINDOWS)[0]["sequence"]
        row = edit_row("chr1", 10, genome, seed=1, af_global=0.5, filter="PASS")
        write_lines(folder / POPULATION, [{**row, **values}])
        seal(folder / "corpus")

    return damage


def other_base(folder: Path) -> None:
    """A population edit of a base that is not the window's."""
    genome = read_lines(folder / WINDOWS)[0]["sequence"]
    row = edit_row("chr1", 10, genome, seed=1)
    other = next(one for one in "ACGT" if one not in (row["ref"], row["alt"]))
    population(ref=other)(folder)


def link_out(folder: Path) -> None:
    """Add a file of the corpus that is outside of its folder."""
    (folder / WINDOWS).rename(folder / "outside.jsonl")
    (folder / WINDOWS).symlink_to(folder / "outside.jsonl")


def both_kinds(folder: Path) -> None:
    """Write some windows with positions and some without."""
    write_lines(
        folder / "corpus/carbon/train.jsonl",
        [{"record_id": "free-1", "sequence": bases(48)}],
    )
    seal(folder / "corpus")


def no_windows(folder: Path) -> None:
    """A corpus that lists no window."""
    (folder / WINDOWS).unlink()
    (folder / "corpus/placed/test.jsonl").unlink()
    seal(folder / "corpus")


def one_family(family: str, **settings: Any) -> dict[str, Any]:
    return {"latentEdit": {"mixture": [{"family": family, **settings}]}}


def edits(name: str, *said: str, shows: str, damage: Damage, **changes: Any) -> Case:
    return Case(name, (shows,), said, damage, "latent_edit", changes)


CASES = [
    # Documents and rows.
    Case(
        "a file that is not there",
        ("input-O-34",),
        ("documents.jsonl: does not exist; spec.training.data.sources[0].path names it",),
        without("documents.jsonl"),
    ),
    Case(
        "an empty file",
        ("input-O-34",),
        ("documents.jsonl: is empty",),
        text("documents.jsonl", ""),
    ),
    Case(
        "a line that is no JSON",
        ("input-2e-14", "8d-12d:pretrain"),
        (
            "documents.jsonl:2: the line is not JSON; ",
            "set spec.training.data.malformed to skip",
        ),
        text("documents.jsonl", '{"text": "fine"}\nbroken\n'),
    ),
    Case(
        "no document at all",
        ("input-G-52",),
        ("documents.jsonl: contains no document in ",),
        text("documents.jsonl", '{"text": ""}\n'),
    ),
    Case(
        "a split that leaves nothing",
        ("input-A-42",),
        ("documents.jsonl: holds 2 documents and 6 would be held out; none would remain",),
        text("documents.jsonl", '{"text": "one"}\n{"text": "two"}\n'),
    ),
    Case(
        "a conversation without roles",
        ("8d-12d:sft",),
        ("rows.jsonl:1: ",),
        text("rows.jsonl", '{"messages": [{"content": "alone"}]}\n'),
        "sft",
    ),
    Case(
        "a pair without its rejected half",
        ("8d-12d:preference",),
        ("pairs.jsonl:1: ",),
        text("pairs.jsonl", '{"prompt": "1+1=", "chosen": "2"}\n'),
        "preference",
    ),
    Case(
        "a share too small to be drawn",
        ("input-T-29",),
        ("spec.training.twoStageKl.stages[1].mixture.more: 1e-06 is too small a share",),
        recipe="two_stage_kl",
        changes={
            "twoStageKl": {
                "stages": [{"tokens": 500}, {"mixture": {"docs": 1, "more": 1e-6}}]
            }
        },
    ),
    Case(
        "a device that is not there",
        ("input-G-21",),
        ("spec.training.runtime.device: ",),
        changes={"runtime": {"device": "cuda"}},
    ),
    # Corpora of edits.
    edits(
        "no snapshot",
        "dataset_manifest.json: snapshot_id is missing",
        shows="input-G-16",
        damage=manifest(lambda raw: raw.pop("snapshot_id")),
    ),
    edits(
        "no files",
        "files is no list with an entry",
        shows="input-G-16",
        damage=manifest(lambda raw: raw.update(files=[])),
    ),
    edits(
        "no manifest",
        "dataset_manifest.json: cannot be read",
        shows="input-G-16",
        damage=without("corpus/dataset_manifest.json"),
    ),
    edits("no window", "window", shows="input-G-18", damage=no_windows),
    edits(
        "no edit of a source that is needed",
        "has too few population edits for 1; it has 0",
        shows="input-G-18",
        damage=population(filter="RF"),
        **one_family("population"),
    ),
    edits(
        "another width than the encoder's",
        "stateWidth: 99 is not the width of a state; ",
        "have 16",
        shows="input-G-28",
        damage=lambda _: None,
        latentEdit={"predictor": {"stateWidth": 99}},
    ),
    edits(
        "a malformed window",
        "placed/train.jsonl:1: is no JSON, at column 14",
        shows="input-G-35",
        damage=text(WINDOWS, '{"sequence": x}\n'),
    ),
    edits(
        "a path with a parent segment",
        "'placed/../x' has a parent segment",
        shows="input-G-38",
        damage=manifest(lambda raw: raw["files"][0].update(path="placed/../x")),
    ),
    edits(
        "a link out of the corpus",
        "leads out of the folder",
        shows="input-G-38",
        damage=link_out,
    ),
    edits(
        "an edit that changes nothing",
        "gnomad/train.jsonl:1: reference and alternate are equal",
        shows="input-G-40",
        damage=population(ref="A", alt="A"),
    ),
    edits(
        "an edit of other letters",
        "gnomad/train.jsonl:1: reference is not a text of A, C, G and T",
        shows="input-G-40",
        damage=population(ref="R"),
    ),
    edits(
        "an edit on other bases",
        "placed/train.jsonl:1: the reference of an edit at 9 is not what stands there",
        shows="input-G-41",
        damage=other_base,
        **one_family("population", fallback="syntheticSnv"),
    ),
    edits(
        "too few edits of a family without a fallback",
        "has too few population edits for 5; it has 4",
        "give population a fallback",
        shows="input-G-49",
        damage=lambda _: None,
        **one_family("population", count=5),
    ),
    edits(
        "a missing population edit of a placed window",
        "has too few population edits for 1; it has 0",
        shows="input-1e-13",
        damage=population(pos=40_000),
        **one_family("population"),
    ),
    edits(
        "two kinds of windows",
        "latentEdit.windows: missing, and ",
        shows="input-1e-14",
        damage=both_kinds,
    ),
    edits(
        "a position that counts from 0",
        "gnomad/train.jsonl:1: position 0 is below 1",
        shows="input-1e-16",
        damage=population(pos=0),
    ),
]


@pytest.fixture(scope="module")
def begun(make_experiment: Callable[[], Experiment]) -> Begun:
    """The experiment of a recipe, created once: its run was stopped, and saved, after two steps."""
    made: dict[str, Experiment] = {}

    def find(recipe: str) -> Experiment:
        if recipe not in made:
            made[recipe] = one = make_experiment()
            write_recipe(one, recipe)
            one.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
        return made[recipe]

    return find


def listing(directory: Path) -> dict[str, str]:
    """The SHA-256 of each file below a directory."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def refused(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the messages of `evergrad run` for ``tiny.yaml``; it exits with 64 and without a traceback."""
    monkeypatch.chdir(directory.parents[1])
    capsys.readouterr()
    code = main(["run", "tiny.yaml", "--run-directory", str(directory)])
    said = capsys.readouterr().err
    assert code == USER_ERROR, said
    assert "Traceback" not in said
    return said


@pytest.mark.acceptance(
    "input-O-34",
    "input-2e-14",
    "8d-12d:pretrain",
    "input-G-52",
    "input-A-42",
    "8d-12d:sft",
    "8d-12d:preference",
    "input-T-29",
    "input-G-21",
    "input-G-16",
    "input-G-18",
    "input-G-28",
    "input-G-35",
    "input-G-38",
    "input-G-40",
    "input-G-41",
    "input-G-49",
    "input-1e-13",
    "input-1e-14",
    "input-1e-16",
)
@pytest.mark.parametrize("case", CASES, ids=[one.name for one in CASES])
def test_invalid_data_ends_the_command_with_64_and_leaves_each_file_of_the_run_unchanged(
    case: Case,
    begun: Begun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(begun(case.recipe).path, folder)
    training = merge(TRAINING[case.recipe], case.changes)
    Experiment(folder).write(training)
    case.damage(folder)

    fresh = refused(folder / "runs/fresh", capsys, monkeypatch)
    assert all(one in fresh for one in case.said), fresh
    asked_for = {"requested.json", "preflight.json"}
    assert listing(folder / "runs/fresh").keys() <= asked_for, "nothing has begun"

    before = listing(folder / "runs/tiny")
    assert "checkpoints/step-2/manifest.json" in before
    refused(folder / "runs/tiny", capsys, monkeypatch)
    assert listing(folder / "runs/tiny") == before


def test_each_acceptance_row_has_a_case() -> None:
    test = (
        test_invalid_data_ends_the_command_with_64_and_leaves_each_file_of_the_run_unchanged
    )
    marks = [mark for mark in test.pytestmark if mark.name == "acceptance"]  # type: ignore[attr-defined]
    assert {row for mark in marks for row in mark.args} == {
        row for case in CASES for row in case.shows
    }

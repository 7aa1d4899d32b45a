"""``spec.script``: the command that it starts, its part of a run's identity, and refused values."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.envelope.script import (
    Program,
    Script,
    program_of,
    program_path,
    worker_command,
    working_directory_of,
)
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.identity import (
    OPERATIONAL_OF_SCRIPT,
    RECIPE_OF_SCRIPT,
    config_hash,
    from_wire,
    recipe_of,
    to_wire,
)
from evergrad_manifest.model.differences import changed_fields
from evergrad_manifest.model.fields import fields_of
from evergrad_manifest.model.view import View, without_nulls
from evergrad_manifest.reading.loader import load_manifest

FOLDER = Path(__file__).parent
BASE = FOLDER / "base_manifest.yaml"
SCRIPT = FOLDER / "script_manifest.yaml"


def run(*overrides: str) -> TrainingRun:
    return load_manifest(SCRIPT, overrides=overrides).run


def refused(*overrides: str) -> dict[str, str]:
    """Return the message of every problem by path."""
    with pytest.raises(ConfigurationError) as raised:
        run(*overrides)
    said = {problem.path: str(problem) for problem in raised.value.problems}
    assert len(said) == len(raised.value.problems)
    return said


def test_a_script_is_read_with_its_defaults() -> None:
    script = run("spec.script={command: [./start]}").script
    assert script.command == ("./start",)
    assert (script.env, script.working_directory, script.grace_period_seconds) == (
        {},
        ".",
        30,
    )
    assert (script.metrics.port, script.metrics.linger_seconds) == (None, 0)


def test_the_accessor_of_the_other_kind_reports_the_kind_of_the_run() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"spec\.training: is not set; this run is a script\. .* needs a typed run",
    ):
        _ = run().training
    typed = load_manifest(BASE).run
    assert typed.training is typed.spec.training
    with pytest.raises(
        ConfigurationError, match=r"spec\.script: is not set; this run has a typed recipe"
    ):
        _ = typed.script


@pytest.mark.parametrize(
    ("command", "program", "started"),
    [
        (["train.py"], Program("file", "train.py", ()), ("python", "-u", "/base/train.py")),
        (
            ["/code/a b.py", "x"],
            Program("file", "/code/a b.py", ("x",)),
            ("python", "-u", "/code/a b.py", "x"),
        ),
        (
            ["-m", "a.b", "-m"],
            Program("module", "a.b", ("-m",)),
            ("python", "-u", "-m", "a.b", "-m"),
        ),
        (
            ["bash", "-c", "a.py"],
            Program("executable", "bash", ("-c", "a.py")),
            ("bash", "-c", "a.py"),
        ),
        (
            ["bin/start", ""],
            Program("executable", "bin/start", ("",)),
            ("/base/bin/start", ""),
        ),
        (["train.pyc"], Program("executable", "train.pyc", ()), ("train.pyc",)),
    ],
)
def test_the_first_word_of_the_command_decides_which_program_starts(
    command: list[str], program: Program, started: tuple[str, ...]
) -> None:
    assert program_of(command) == program
    script = Script.model_validate({"command": command})
    assert worker_command(script, base_directory=Path("/base"), python="python") == started


def test_only_programs_named_by_a_path_have_a_path() -> None:
    paths = [
        program_path(program_of(command), Path("/base"))
        for command in (["-m", "a"], ["bash"], ["x.py"], ["./x"])
    ]
    assert paths == [None, None, Path("/base/x.py"), Path("/base/x")]


def test_the_working_directory_is_relative_to_the_manifest() -> None:
    assert working_directory_of(run().script, Path("/base")) == Path("/base/code")
    assert working_directory_of(
        run("spec.script.workingDirectory=/else").script, Path("/base")
    ) == Path("/else")


# Refused values. The table of bad manifests contains the cases that an API server should refuse, too.


def test_both_kinds_or_neither_is_one_problem_of_the_spec() -> None:
    typed = json.dumps(yaml.safe_load(BASE.read_text())["spec"]["training"])
    assert refused("spec.workersPerNode=null", f"spec.training={typed}") == {
        "spec": (
            "spec: training and script are both set (line 5); a run is exactly one of them. Remove "
            "one of them."
        )
    }
    assert refused("spec.script=null") == {
        "spec": "spec: neither training nor script is set (line 5); a run is exactly one of them. "
        "Add training (the typed recipe), or script with a command such as [train.py]."
    }


@pytest.mark.parametrize(
    ("command", "path", "said"),
    [
        (["torchrun", "train.py"], "[0]", "'torchrun' is a launcher"),
        (
            ["/opt/bin/torchrun", "--nproc-per-node=2", "-m", "x"],
            "[0]",
            "Begin with what follows its options: '-m'.",
        ),
        (
            ["-m", "torch.distributed.run", "--nnodes=1", "go.py"],
            "[1]",
            "Begin with what follows its options: 'go.py'.",
        ),
        (
            ["python3.12", "-u", "-m", "torch.distributed.launch", "go.py"],
            "[3]",
            "is a launcher",
        ),
        (
            ["--nproc-per-node", "2", "train.py"],
            "[0]",
            "'--nproc-per-node' is an option, not a program",
        ),
        (
            ["--nproc=2", "train.py"],
            "[0]",
            "the run sets them from nodes and workersPerNode. Begin with the program",
        ),
        (
            ["-m"],
            "",
            "names no module (--set); one must follow -m. Write it as [-m, package.module].",
        ),
        (
            ["-m", "a/b.py"],
            "[1]",
            "'a/b.py' is not a module's name (--set); it is words with dots between them. Remove -m",
        ),
        (["-m", "a..b"], "[1]", "Write it as in an import."),
        (
            ["train.py --epochs 3"],
            "[0]",
            "no shell splits a command into words. Write each word as an item: ['train.py',",
        ),
        (["code/train.py --epochs 3"], "[0]", "contains several words"),
        ([""], "[0]", "names no program"),
        ([" "], "[0]", "names no program"),
        (["~/train.py"], "[0]", "begins with ~"),
        (["s3://bucket/train.py"], "[0]", "is a URL"),
        (["train.py", "a\0b"], "[1]", "has a NUL character"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, list) else "",
)
def test_a_command_that_cannot_be_valid_is_refused(
    command: list[str], path: str, said: str
) -> None:
    problems = refused(f"spec.script.command={json.dumps(command)}")
    assert list(problems) == [f"spec.script.command{path}"]
    assert said in problems[f"spec.script.command{path}"]


@pytest.mark.parametrize(
    "command",
    [
        ["/opt/my tools/start"],
        ["my code/train.py"],
        ["python", "torch_run.py"],
        ["python"],
        ["bash", "-c", "torchrun x"],
        ["train.py", "--nproc", "2"],
    ],
    ids=json.dumps,
)
def test_an_unusual_but_valid_command_is_accepted(command: list[str]) -> None:
    assert list(run(f"spec.script.command={json.dumps(command)}").script.command) == command


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "EVERGRAD_X",
    ],
)
def test_the_variables_of_the_launcher_are_reserved(name: str) -> None:
    assert (
        f"'{name}' is reserved (--set); the run sets it"
        in refused(f"spec.script.env.{name}=a")[f"spec.script.env.{name}"]
    )


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "Ä", "A\n"])
def test_variable_names_are_limited_to_names_that_every_shell_accepts(name: str) -> None:
    (said,) = refused(f"spec.script.env={json.dumps({name: 'x'})}").values()
    assert "is not a variable's name" in said


# Identity.


def test_every_script_field_is_either_recipe_or_operational() -> None:
    assert set(fields_of(Script)) == {*RECIPE_OF_SCRIPT, *OPERATIONAL_OF_SCRIPT}
    assert not set(RECIPE_OF_SCRIPT) & set(OPERATIONAL_OF_SCRIPT)


@pytest.mark.parametrize(
    "override",
    [
        "metadata.name=other",
        "spec.nodes={min: 2}",
        "spec.script.gracePeriodSeconds=1",
        "spec.script.metrics=null",
        "spec.workersPerNode=9",
    ],
)
def test_operational_fields_may_change(override: str) -> None:
    assert config_hash(run(override)) == config_hash(run())
    assert (
        changed_fields(recipe_of(run()), recipe_of(run(override)), where="spec.script")
        == []
    )


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("spec.script.command[2]='4'", "spec.script.command[2]"),
        ("spec.script.command=[train.py]", "spec.script.command"),
        ("spec.script.env.MODE=slow", "spec.script.env.MODE"),
        ("spec.script.env.MORE=x", "spec.script.env.MORE"),
        ("spec.script.workingDirectory=.", "spec.script.workingDirectory"),
    ],
)
def test_recipe_fields_change_the_hash_and_are_named(override: str, path: str) -> None:
    assert config_hash(run(override)) != config_hash(run())
    assert [
        change[0]
        for change in changed_fields(
            recipe_of(run()), recipe_of(run(override)), where="spec.script"
        )
    ] == [path]


def test_the_hash_of_a_script_is_a_fixed_function_of_its_recipe() -> None:
    # A release that changes this number makes every existing script run refuse to continue.
    assert (
        config_hash(run())
        == "6fe226d59927bfb36ef16e2b99e12bf6c64ff970e20b7be1987e92a47145dbc7"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("spec.script={command: [-m, a]}",),
        ("spec.nodes=null", "spec.script.env={A: ''}"),
    ],
)
def test_a_script_is_unchanged_by_the_wire_format_which_is_itself_a_manifest(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    original = run(*overrides)
    wire: dict[str, Any] = json.loads(json.dumps(to_wire(original), allow_nan=False))
    assert (
        "training" not in wire["spec"]
        and "script" not in to_wire(load_manifest(BASE).run)["spec"]
    )
    assert from_wire(wire) == original
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(wire))
    assert load_manifest(path).run == original


def test_the_view_of_a_script_equals_the_parsed_script() -> None:
    raw = without_nulls(yaml.safe_load(SCRIPT.read_text()), TrainingRun)
    view = View(raw, TrainingRun)
    assert (
        view.get("spec.training") is None
        and view.get("spec.training.batching.microBatchSize") is None
    )
    assert view.get("spec.script.command") == ("train.py", "--epochs", "3")
    assert view.get("spec.script.metrics.port") == 9100

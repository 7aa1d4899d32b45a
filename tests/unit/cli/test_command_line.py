"""The command line as a whole: when modules are imported, and the exit code of an invalid command line."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evergrad_cli.main import CLUSTER_COMMANDS, COMMANDS, OTHERS_COMMANDS, main

_HEAVY = ("torch", "transformers", "matplotlib")


@pytest.mark.capability("G-X26")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["validate", "missing.yaml"],
        ["checkpoint", "list", "missing"],
    ],
)
def test_commands_without_tensors_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib, os\n"
        "from evergrad_cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, 'w')):\n"
        f"    main({arguments!r})\n"
        f"print([name for name in {_HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    if arguments[0] == "checkpoint":
        # Checkpoints are torch's; drawing is not needed to list them.
        assert "matplotlib" not in result.stdout
    else:
        assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["list", "submit", "doctor"])
def test_cluster_commands_import_no_torch_and_their_client_only_when_they_run(
    command: str,
) -> None:
    code = (
        "import sys, contextlib, os\n"
        "from evergrad_cli.main import main, main_of_plugin\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, 'w')):\n"
        f"    main_of_plugin([{command!r}, '--help'])\n"
        "print([name for name in ('kubernetes', 'numpy', 'pydantic') if name in sys.modules])\n"
        "with contextlib.redirect_stderr(open(os.devnull, 'w')):\n"
        "    main(['list', '--kubeconfig', '/nowhere/config'])\n"
        "print('kubernetes' in sys.modules)\n"
        f"print([name for name in {_HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    told = [] if command != "submit" else ["pydantic"]
    assert result.stdout.splitlines()[-3:] == [str(told), "True", "[]"]


@pytest.mark.parametrize("name", [*COMMANDS, *CLUSTER_COMMANDS])
def test_every_command_has_help_with_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name.replace("_", "-"), "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"examples:\n  evergrad {name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["run"], ["run", "--workers", "two", "x.yaml"]]
)
def test_an_invalid_command_line_ends_with_64_and_one_clear_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 64
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: evergrad")


_WITHOUT_TRAINER = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'torch', 'numpy', 'transformers', 'tokenizers', 'safetensors', 'matplotlib', 'xxhash'}:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Missing())
from evergrad_cli.main import CLUSTER_COMMANDS, main
for arguments in ARGUMENTS(CLUSTER_COMMANDS):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    print('ended', ' '.join(arguments), code)
"""


def _run_without_trainer(arguments: str) -> subprocess.CompletedProcess[str]:
    """``arguments``: an expression that maps the names of the cluster commands to command lines."""
    code = _WITHOUT_TRAINER.replace("ARGUMENTS", f"(lambda names: {arguments})")
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )


def test_help_and_cluster_commands_run_without_torch_and_numpy() -> None:
    result = _run_without_trainer(
        "[['--help'], [], ['no-such-command'], *([name, '--help'] for name in names)]"
    )
    ended = [line for line in result.stdout.splitlines() if line.startswith("ended ")]
    assert ended[:3] == ["ended --help 0", "ended  64", "ended no-such-command 64"]
    assert ended[3:] == [f"ended {name} --help 0" for name in CLUSTER_COMMANDS]


@pytest.mark.acceptance("input-4e-18")
def test_validate_runs_without_torch_and_reports_problems() -> None:
    result = _run_without_trainer("[['validate', '/nowhere/run.yaml']]")
    assert result.stdout.splitlines()[-1] == "ended validate /nowhere/run.yaml 64"
    assert "/nowhere/run.yaml" in result.stderr


def test_a_command_that_needs_a_missing_package_names_it_instead_of_a_traceback() -> None:
    result = _run_without_trainer("[['run', 'trainingrun.yaml']]")
    assert result.stdout.splitlines()[-1] == "ended run trainingrun.yaml 64"
    assert result.stderr.startswith(
        "error: evergrad run: needs the Python package xxhash, which is not installed here"
    )


def test_bash_completion_offers_every_command_and_the_options_of_the_typed_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}\n"
        'complete_words() { COMP_WORDS=(evergrad "$@"); COMP_CWORD=$#; COMPREPLY=(); '
        "$(complete -p evergrad | sed -E 's/.*-F ([^ ]+) .*/\\1/') evergrad \"${@: -1}\" ''; "
        'echo "${COMPREPLY[*]}"; }\n'
        "complete_words ''\ncomplete_words run --no\n"
    )
    result = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    commands, options = result.stdout.splitlines()[-2:]
    assert set(commands.split()) >= {
        name.replace("_", "-") for name in (*COMMANDS, *CLUSTER_COMMANDS)
    }
    assert set(options.split()) == {"--nodes", "--no-preflight"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_without_the_trainer_offers_its_command_names(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "prepare" in script and "prune" in script
    assert "--no-preflight" not in script


def test_completion_runs_with_a_trainer_without_torch() -> None:
    result = _run_without_trainer("[['completion', 'bash']]")
    assert result.stdout.splitlines()[-1] == "ended completion bash 0"
    assert result.stderr == ""


@pytest.mark.capability("O-80")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "serve",
            "serves none. Export one by `evergrad checkpoint export`, and give the directory",
        ),
        ("train", "error: evergrad: train is not a command. Use `evergrad run`."),
        ("pretokenize", "Use `evergrad prepare`."),
    ],
)
def test_a_command_of_other_trainers_is_refused_with_a_remedy(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "run.yaml"])
    assert ended.value.code == 64
    assert said in capsys.readouterr().err


def test_remedies_for_commands_of_other_trainers_name_existing_commands() -> None:
    for name, remedy in OTHERS_COMMANDS.items():
        assert name not in {*COMMANDS, *CLUSTER_COMMANDS}
        for command in re.findall(r"`evergrad (\w+)", remedy):
            assert command in COMMANDS


def run_printing(
    ending: str, *, to: str, shell: str, unbuffered: str = "", **streams: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a command that prints without a flush, like most commands, and ends with ``ending``.

    ``shell``: redirections of its streams.
    """
    code = (
        "import argparse, sys, types\n"
        "from evergrad_cli.main import _execute\n"
        "from evergrad_manifest.errors import ConfigurationError, Problem\n"
        "def execute(args):\n"
        f"    for _ in range(3): print('x' * 100, file=sys.{to})\n"
        f"    {ending}\n"
        "command = types.SimpleNamespace(NAME='list', execute=execute)\n"
        "sys.exit(_execute(argparse.Namespace(command=command, is_for_cluster=True, errors='text')))"
    )
    # An empty value counts as no value.
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", code]
    return subprocess.run(command, check=False, env=environment, **streams)


def run_unread(
    ending: str, *, stream: str, unbuffered: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """Run the same command with a pipe as ``stream`` from which no process reads."""
    reading, writing = os.pipe()
    os.close(reading)
    other = "stderr" if stream == "stdout" else "stdout"
    with os.fdopen(writing, "wb") as closed:
        streams: dict[str, Any] = {stream: closed, other: subprocess.PIPE}
        return run_printing(ending, to=stream, shell="", unbuffered=unbuffered, **streams)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_output_pipe_ends_a_successful_command_silently_with_0(
    stream: str, unbuffered: str
) -> None:
    result = run_unread("return 0", stream=stream, unbuffered=unbuffered)
    assert result.returncode == 0
    assert not (result.stderr if stream == "stdout" else result.stdout)


WRONG = "raise ConfigurationError(Problem('spec', 'is wrong'))"


@pytest.mark.parametrize(("ending", "said"), [("return 64", ""), (WRONG, "error: spec")])
def test_a_failing_command_keeps_its_exit_code_if_its_output_pipe_is_closed(
    ending: str, said: str
) -> None:
    result = run_unread(ending, stream="stdout")
    assert result.returncode == 64
    assert result.stderr.decode().startswith(said) and b"Broken" not in result.stderr


def test_an_error_on_a_closed_stderr_keeps_its_exit_code() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        result = run_printing(
            WRONG, to="stdout", shell="", stdout=subprocess.PIPE, stderr=closed
        )
    assert result.returncode == 64 and result.stdout.startswith(b"xxx")


@pytest.mark.parametrize("closed", ["1", "2"])
@pytest.mark.parametrize(("ending", "code"), [("return 0", 0), (WRONG, 64)])
def test_a_command_ends_normally_if_an_output_is_closed(
    closed: str, ending: str, code: int
) -> None:
    to = "stdout" if closed == "1" else "stderr"
    result = run_printing(ending, to=to, shell=f"{closed}>&-", capture_output=True)
    assert result.returncode == code
    # The other stream has no content of the closed one.
    assert result.stdout == b""
    said = b"error: spec" if (ending, closed) == (WRONG, "1") else b""
    assert result.stderr.startswith(said) and bool(result.stderr) == bool(said)

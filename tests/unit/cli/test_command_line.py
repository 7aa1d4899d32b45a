"""The command line as a whole: what is imported when, and what a wrong command line ends with."""

import subprocess
import sys

import pytest

from evergrad_trainer.cli.main import CLUSTER_COMMANDS, COMMANDS, main

_HEAVY = ("torch", "transformers", "matplotlib")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["validate", "missing.yaml"], ["checkpoint", "list", "missing"]]
)
def test_commands_that_need_no_tensors_import_none(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib, os\n"
        "from evergrad_trainer.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, 'w')):\n"
        f"    main({arguments!r})\n"
        f"print([name for name in {_HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if arguments[0] == "checkpoint":
        # Checkpoints are torch's; drawing is not needed to list them.
        assert "matplotlib" not in result.stdout
    else:
        assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["list", "submit", "doctor"])
def test_commands_for_a_cluster_import_no_tensors_and_their_client_only_when_they_run(command: str) -> None:
    code = (
        "import sys, contextlib, os\n"
        "from evergrad_trainer.cli.main import main, main_of_plugin\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, 'w')):\n"
        f"    main_of_plugin([{command!r}, '--help'])\n"
        "print([name for name in ('kubernetes', 'numpy', 'pydantic') if name in sys.modules])\n"
        "with contextlib.redirect_stderr(open(os.devnull, 'w')):\n"
        "    main(['list', '--kubeconfig', '/nowhere/config'])\n"
        "print('kubernetes' in sys.modules)\n"
        f"print([name for name in {_HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [] if command != "submit" else ["pydantic"]
    assert result.stdout.splitlines()[-3:] == [str(told), "True", "[]"]


@pytest.mark.parametrize("name", [*COMMANDS, *CLUSTER_COMMANDS])
def test_every_command_explains_itself_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name.replace("_", "-"), "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"examples:\n  evergrad {name.replace('_', '-')}" in text


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["run"], ["run", "--workers", "two", "x.yaml"]])
def test_a_wrong_command_line_ends_with_64_and_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 64
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: evergrad")

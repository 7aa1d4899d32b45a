"""A worker of a script: Python in a warm process behaves as if it was started alone, and errors are
reported."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from patience import PATIENCE

from evergrad_manifest.envelope.script import Script
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.script_files import script_problems
from evergrad_trainer.node.script_worker import _names_from, preload

ROOT = Path(__file__).resolve().parents[3]

RUNNER = """
import json, sys
from pathlib import Path
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.envelope.script import Script
from evergrad_trainer.worker.channel import channel_pair
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.node.script_worker import run_script
ours, theirs = channel_pair()
script = Script.model_validate(json.loads(sys.argv[1]))
code = run_script(theirs, WorkerHeartbeat(), script=script, base_directory=Path(sys.argv[2]), is_warm=sys.argv[3] == "warm")
sys.stdout.flush()
print(json.dumps([code, repr(ours.receive(0))]))
"""


def run(
    tmp_path: Path, code: str, *, command: list[str], is_warm: bool = True
) -> tuple[list[str], int, str]:
    """Return (output, exit code, records for the supervisor) from a separate process, because a script
    changes its whole process."""
    (tmp_path / "train.py").write_text(textwrap.dedent(code), "utf-8")
    (tmp_path / "beside.py").write_text("VALUE = 'beside'\n", "utf-8")
    document = json.dumps({"command": command, "env": {"KEY": "value"}})
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            RUNNER,
            document,
            str(tmp_path),
            "warm" if is_warm else "cold",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    *printed, last = ended.stdout.splitlines() or [""]
    if not last.startswith("["):
        return [*printed, last], ended.returncode, ""
    exit_code, heard = json.loads(last)
    return printed, exit_code, heard


SHOW = """
import os, sys
import beside
print(__name__, sys.argv, beside.VALUE, os.environ["KEY"], os.getcwd())
"""


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_python_file_finds_its_arguments_environment_and_neighbours(
    tmp_path: Path, is_warm: bool
) -> None:
    printed, code, _ = run(
        tmp_path, SHOW, command=["train.py", "--epochs", "3"], is_warm=is_warm
    )
    assert printed == [
        f"__main__ {[str(tmp_path / 'train.py'), '--epochs', '3']} beside value {tmp_path}"
    ]
    assert code == 0


def test_a_module_is_run_as_by_python(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/train.py").write_text(
        "import sys\nprint(__name__, sys.argv[1:])\n", "utf-8"
    )
    printed, code, _ = run(tmp_path, "", command=["-m", "package.train", "x"])
    assert (printed, code) == (["__main__ ['x']"], 0)


@pytest.mark.parametrize(
    ("call", "code"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no')", 1)]
)
def test_the_exit_code_of_the_script_is_the_exit_code_of_the_worker(
    tmp_path: Path, call: str, code: int
) -> None:
    assert run(tmp_path, f"import sys\n{call}\n", command=["train.py"])[1] == code


def test_an_error_is_reported_with_its_last_frames(tmp_path: Path) -> None:
    _, code, heard = run(
        tmp_path, "def f():\n    raise KeyError('label')\nf()\n", command=["train.py"]
    )
    assert code == 1
    assert "KeyError" in heard and "label" in heard and "in f" in heard


def test_only_known_libraries_that_the_script_imports_are_loaded_before_the_fork(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import numpy as np\nimport mine\nfrom torch import nn\ndef f():\n    from os import path\n",
        "utf-8",
    )
    assert set(_names_from(path)) == {"numpy", "mine", "torch", "os"}
    assert preload(Script(command=("train.py",)), tmp_path) == ("torch", "numpy")


def test_a_script_that_cannot_be_parsed_is_left_to_its_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def (", "utf-8")
    assert preload(Script(command=("train.py",)), tmp_path) == ("torch",)


def test_the_manifest_of_the_documentation_is_valid_and_its_script_exists(
    tmp_path: Path,
) -> None:
    text = (
        (ROOT / "docs/train/elastic-scripts.md")
        .read_text("utf-8")
        .split("```yaml\n")[1]
        .split("```")[0]
    )
    (tmp_path / "demo.yaml").write_text(text, "utf-8")
    script = load_manifest(tmp_path / "demo.yaml").run.script
    assert script.grace_period_seconds == 60
    assert script_problems(script, base_directory=ROOT) == []


def test_names_that_a_script_imports_from_a_package_are_found(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from transformers import LlamaForCausalLM, LlamaConfig as Config\n"
        "from transformers.models.gpt2 import GPT2Config\n"
        "import transformers\n",
        "utf-8",
    )
    assert _names_from(path) == {"transformers": {"LlamaForCausalLM", "LlamaConfig"}}


@pytest.mark.long
def test_the_model_class_that_a_script_imports_is_loaded_before_workers_are_forked(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(
        "from transformers import NoSuchClass, LlamaForCausalLM\n", "utf-8"
    )
    code = (
        "import sys; from pathlib import Path; from evergrad_manifest.envelope.script import Script; "
        "from evergrad_trainer.node.script_worker import preload; "
        "preload(Script(command=('train.py',)), Path(sys.argv[1])); "
        "print('transformers.models.llama.modeling_llama' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert ended.stdout.split() == ["True"]

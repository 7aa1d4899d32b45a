"""Two concurrent commands: both must succeed, all output is shown, and an interrupt ends both."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

SCRIPT = Path(__file__).resolve().parents[2] / "side_by_side.py"


def python(code: str) -> str:
    return f'{sys.executable} -c "{code}"'


@pytest.mark.parametrize(
    ("front", "behind", "code"), [(0, 0, 0), (3, 0, 1), (0, 3, 1), (3, 4, 1)]
)
def test_the_exit_code_is_1_if_either_command_fails_and_both_outputs_are_shown(
    front: int, behind: int, code: int
) -> None:
    commands = (
        "--front",
        python(f"print('before'); raise SystemExit({front})"),
        "--behind",
        python(f"print('after'); raise SystemExit({behind})"),
    )
    result = subprocess.run(
        [sys.executable, SCRIPT, *commands], capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert result.stdout.splitlines() == ["before", "after"]
    failed = [name for name, number in (("front", front), ("behind", behind)) if number]
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == failed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "shell", ["", "trap '' INT; "], ids=["in front", "in the background"]
)
def test_a_signal_interrupts_both_commands_waits_for_cleanup_and_shows_the_output(
    tmp_path: Path, number: signal.Signals, shell: str
) -> None:
    """Even if the shell ignores SIGINT, as for background processes."""
    code = """
import sys, time, pathlib
name = sys.argv[1]
print(pathlib.Path(name).name, flush=True)
try:
    pathlib.Path(name + '.begun').touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.3)
    pathlib.Path(name + '.cleaned').touch()
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    commands = [f"{sys.executable} {program} {tmp_path / name}" for name in ("one", "two")]
    command = [sys.executable, str(SCRIPT), "--front", commands[0], "--behind", commands[1]]
    process = subprocess.Popen(
        # Under nohup SIGHUP is ignored, and would stay so.
        ["env", "--default-signal=HUP", "bash", "-c", f"{shell}exec {shlex.join(command)}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while len(list(tmp_path.glob("*.begun"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        said, _ = process.communicate(timeout=PATIENCE)
        assert (process.returncode, said.split()) == (130, ["one", "two"])
    finally:
        process.kill()
        process.wait()
    assert {one.name for one in tmp_path.glob("*.cleaned")} == {
        "one.cleaned",
        "two.cleaned",
    }

"""What `.ci/run` installs."""

from pathlib import Path

from bed.requirements import COMMANDS, PLUGINS

CI = Path(__file__).resolve().parents[3] / ".ci/run"


def test_ci_installs_all_that_the_bed_needs() -> None:
    text = CI.read_text("utf-8")
    assert [
        f"{command}:{package}"
        for command, package in COMMANDS.items()
        if f"{command}:{package}" not in text
    ] == []
    assert f"[ -x {PLUGINS} ]" in text

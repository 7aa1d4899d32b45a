"""Writes walkthrough.md: runs the README's commands for a cluster, and some more, and records their output.

Run it as root from the root of the repository while no cluster of `make cluster` is up:

    .venv/bin/python tools/docs/record_walkthrough.py

With EVERGRAD_BED=N it uses another cluster next to the first, whose folder is .clusterN.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/start/walkthrough.md"
HEAD = """\
# Walk-through on a cluster

Recorded by `tools/docs/record_walkthrough.py`, which ran these commands on a machine of two cores without a GPU; nothing is edited but
paths of that machine. `make cluster` starts a Kubernetes of two nodes there. On a cluster of your own begin with `helm install`.
"""
MORE = (
    (
        "A pod is deleted while the run trains",
        "kubectl get pods -l evergrad.dev/run=quickstart",
    ),
    (
        "",
        "kubectl get trun quickstart -w & sleep 1; kubectl delete pod quickstart-1-0 --wait=false; sleep 30; kill $!",
    ),
    ("", "kubectl get pods -l evergrad.dev/run=quickstart"),
)
AFTER = (
    ("After the run", "kubectl describe trun quickstart | tail -n 25"),
    ("", "kubectl logs -l evergrad.dev/run=quickstart,evergrad.dev/index=0 --tail=4"),
    ("", "evergrad list; evergrad checkpoints quickstart"),
    ("", "kubectl apply -f examples/quickstart/; sleep 5; kubectl get trun quickstart"),
    ("The end", "kubectl delete trun quickstart; kubectl get pvc"),
    ("", "make cluster-down"),
)


def readme_commands() -> list[str]:
    """Return the commands of the README's section on clusters."""
    section = (ROOT / "README.md").read_text("utf-8").split("## On a cluster", 1)[1]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None  # noqa: S101 - the README is ours
    return [line.split("  #")[0].strip() for line in block[1].splitlines() if line.strip()]


def main() -> int:
    """Run the commands and record them. Return 1 at the first command that fails."""
    commands: list[tuple[str, str]] = []
    for command in readme_commands():
        if command.startswith("kubectl wait"):
            commands += [
                ("", "kubectl wait --for=condition=Ready trun/quickstart --timeout=3m"),
                *MORE,
            ]
        commands.append(("Up" if command.startswith("make") else "", command))
    environment = {**os.environ, "COLUMNS": "150"}
    folder = f".cluster{os.environ.get('EVERGRAD_BED', '')}/"
    text = [HEAD]
    for title, command in (*commands, *AFTER):
        if title:
            text.append(f"## {title}\n")
        if command.startswith("export"):
            found = subprocess.run(
                ["bash", "-c", f"{command.replace('.cluster/', folder)}; env -0"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                check=True,
            )
            environment = dict(
                item.split("=", 1) for item in found.stdout.decode().split("\0") if item
            )
            text.append(f"    $ {command}\n")
            continue
        print(f"$ {command}", flush=True)
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begun
        printed = (
            (done.stdout + done.stderr)
            .replace(str(ROOT), ".")
            .replace(str(Path.home()), "~")
            .replace(folder, ".cluster/")
        )
        lines = "".join(
            f"    {line}".rstrip() + "\n" for line in printed.rstrip().splitlines()
        )
        text.append(f"    $ {command}\n{lines}\n*{seconds:.0f} s*\n")
        if done.returncode:
            print(printed)
            return 1
    PAGE.write_text("\n".join(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

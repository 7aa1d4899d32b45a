"""Install from the lock files, or write them again. Uses only the standard library, because it runs before
anything is installed.

trainer.txt    everything the trainer needs except torch
torch.txt      the index's build of torch and, on Linux, the CUDA packages that this build needs
torch-cpu.txt  a CPU build of torch. The index has none for Linux, so it needs a folder of wheels.
operator.txt   everything the operator and the coordinator need; the trainer needs some of it, too, in the
               same version
dev.txt        what tests, checks and benchmarks need in addition to all others
"""

import argparse
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml")))
# Modules that most test processes import. With their own imports, they are worth compiling.
COMPILED = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.elastic.rendezvous",
    "torch._dynamo",
    "matplotlib.pyplot",
    "kopf",
    "kubernetes",
    "aiohttp.web",
    "hypothesis",
    "pytest_timeout",
    "xdist.remote",
    "_pytest.pytester",
    "evergrad_cli.main",
    "evergrad_coordinator.__main__",
    "evergrad_trainer.commands.nodes",
    "evergrad_trainer.report.build",
    "evergrad_trainer.worker.run",
)
ROOTS = ("trainer.in", "operator.in", "dev.in")
FILES = ("trainer.txt", "torch.txt", "operator.txt", "dev.txt")
HEADER = "# Written by `make lock`. Do not edit; change {source} instead.\n# {duty}\n"
# torch's CPU build has none of these requirements. Packages that only they need are left out, too.
CUDA_NAMES = ("nvidia-", "cuda-", "triton")


@dataclass(frozen=True)
class Pin:
    """One pinned release: its text in the lock, and its parents (package names, or the .in file that names
    it)."""

    name: str
    version: str
    text: str
    parents: frozenset[str]


def parse_lock(text: str) -> list[Pin]:
    """Return every pin of a lock file written by uv. A name occurs twice if its version depends on a
    marker."""
    pins = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", "\n" + text):
        match = re.match(r"\n?([A-Za-z0-9._-]+)==([^\s;\\]+)", block)
        if match is None:
            continue
        body = "\n".join(
            line for line in block.strip("\n").splitlines() if not line.startswith("#")
        )
        parents = re.findall(
            r"^ +# +(?:via)? *(?:-r )?([A-Za-z0-9._-]+)$", body, re.MULTILINE
        )
        pins.append(Pin(match[1], match[2], body + "\n", frozenset(parents) - {"via"}))
    return pins


def hashes(text: str) -> set[str]:
    """Return the SHA-256 sums that a lock file, or a part of one, allows."""
    return set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))


def reachable(pins: Iterable[Pin], root: str, *, with_cuda: bool) -> set[str]:
    """Return the names of the packages that ``root`` (a .in file) needs, with or without the packages that
    torch's CUDA build adds."""
    children: dict[str, set[str]] = {}
    for pin in pins:
        for parent in pin.parents:
            if with_cuda or not (parent == "torch" and pin.name.startswith(CUDA_NAMES)):
                children.setdefault(parent, set()).add(pin.name)
    found: set[str] = set()
    waiting = [root]
    while waiting:
        new = children.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def split_lock(pins: Sequence[Pin]) -> dict[str, str]:
    """Return the text of the pins for each of the four files that come from one resolution, by file name."""
    trainer = reachable(pins, "trainer.in", with_cuda=False) - {"torch"}
    torch = reachable(pins, "trainer.in", with_cuda=True) - trainer
    operator = reachable(pins, "operator.in", with_cuda=False)
    parts = {
        "trainer.txt": [pin for pin in pins if pin.name in trainer],
        "torch.txt": [pin for pin in pins if pin.name in torch],
        "operator.txt": [pin for pin in pins if pin.name in operator],
        "dev.txt": [pin for pin in pins if pin.name not in trainer | torch | operator],
    }
    return {name: "".join(pin.text for pin in part) for name, part in parts.items()}


def find_cpu_wheels(folder: Path | None, version: str) -> list[Path]:
    """Return the CPU builds of this torch version in ``folder``."""
    return sorted(folder.glob(f"torch-{version}+cpu-*.whl")) if folder else []


def fits_this_python(wheel: Path) -> bool:
    """Return whether the tags in a torch wheel's name match this interpreter and this machine."""
    *_, python, _abi, platforms = wheel.stem.split("-")
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return (
        python == ours
        and platforms.endswith(platform.machine())
        and sys.platform.startswith("linux") == ("linux" in platforms)
    )


def choose_torch(
    wheels: Path | None, *, locked_version: str, installed_version: str | None
) -> list[str]:
    """Return pip's arguments for torch: the CPU build if it is offered or already installed, or else the
    index's build."""
    if wheels and any(
        fits_this_python(wheel) for wheel in find_cpu_wheels(wheels, locked_version)
    ):
        return ["--find-links", str(wheels), "-r", str(FOLDER / "torch-cpu.txt")]
    if wheels:
        print(
            f"{wheels}: holds no CPU build of torch {locked_version} for this Python; taking the "
            "index's build.",
            flush=True,
        )
    if installed_version == f"{locked_version}+cpu":
        return ["-r", str(FOLDER / "torch-cpu.txt")]
    return ["-r", str(FOLDER / "torch.txt")]


def locked_torch_version() -> str:
    return next(
        pin.version
        for pin in parse_lock((FOLDER / "torch.txt").read_text())
        if pin.name == "torch"
    )


def installed_torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def run(command: Sequence[str]) -> None:
    """Print and run a command. Raises CalledProcessError."""
    print("+", shlex.join(command), flush=True)
    subprocess.run(command, check=True)


def install(wheels: Path | None) -> None:
    """Install the locked packages into this Python's environment, and then our packages as editable."""
    # pip compiles nothing: only a few modules of torch, transformers and kubernetes are ever imported.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    torch = choose_torch(
        wheels,
        locked_version=locked_torch_version(),
        installed_version=installed_torch_version(),
    )
    locks = [
        part
        for name in ("trainer.txt", "operator.txt", "dev.txt")
        for part in ("-r", str(FOLDER / name))
    ]
    run([*pip, "--require-hashes", *torch, *locks])
    editable = [part for name in PACKAGES for part in ("--editable", str(ROOT / name))]
    run([*pip, "--no-deps", "--no-build-isolation", *editable])
    compile_imports()


def compile_imports() -> None:
    """Write the bytecode of this repository's packages and of the modules that they import.

    If PYTHONDONTWRITEBYTECODE is set, no other process writes bytecode, and each process would compile all
    parts of torch that it imports.
    """
    folders = [str(ROOT / name) for name in PACKAGES]
    run([sys.executable, "-m", "compileall", "-q", *folders])
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONDONTWRITEBYTECODE"
    }
    imports = f"import {', '.join(COMPILED)}"
    subprocess.run([sys.executable, "-c", imports], check=True, env=environment)


def update(wheels: Path | None, *, upgrade: bool) -> None:
    """Resolve again for every supported Python and platform, and keep existing pins unless ``upgrade`` is
    set."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "all.txt"
        output.write_text(
            "".join(
                (FOLDER / name).read_text() for name in FILES if (FOLDER / name).exists()
            )
        )
        uv = [
            str(Path(sys.executable).parent / "uv"),
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--python-version",
            "3.11",
        ]
        uv += [
            "--generate-hashes",
            "--no-header",
            "--no-emit-index-url",
            "--no-emit-find-links",
            "--output-file",
            str(output),
        ]
        print("+", shlex.join([*uv, *ROOTS]), flush=True)
        subprocess.run(
            [*uv, *(["--upgrade"] if upgrade else []), *ROOTS], check=True, cwd=FOLDER
        )
        pins = parse_lock(output.read_text())
    duties = {
        "trainer.txt": (
            "trainer.in",
            "What the trainer needs except torch: torch.txt or torch-cpu.txt has that.",
        ),
        "torch.txt": (
            "trainer.in",
            "The index's build of torch and, on Linux, the CUDA packages that build needs.",
        ),
        "operator.txt": (
            "operator.in",
            "What the operator needs, the coordinator included.",
        ),
        "dev.txt": (
            "dev.in",
            "What tests, checks and benchmarks need beyond the trainer and the operator.",
        ),
    }
    for name, text in split_lock(pins).items():
        source, duty = duties[name]
        (FOLDER / name).write_text(HEADER.format(source=source, duty=duty) + text)
    update_cpu_lock(wheels, version=locked_torch_version())


def update_cpu_lock(wheels: Path | None, *, version: str) -> None:
    """Pin the CPU builds in ``wheels``, and keep the builds that are already pinned for this version.

    Raises SystemExit if there are none.
    """
    path = FOLDER / "torch-cpu.txt"
    old = path.read_text() if path.exists() else ""
    known = hashes(old) if f"torch=={version}+cpu " in old else set()
    for wheel in find_cpu_wheels(wheels, version):
        with wheel.open("rb") as file:
            known.add(hashlib.file_digest(file, "sha256").hexdigest())
    if not known:
        raise SystemExit(
            f"torch-cpu.txt: no CPU build of torch {version} is known. Name a folder that holds "
            "one in TORCH_WHEELS."
        )
    header = HEADER.format(
        source="trainer.in",
        duty=(
            "The CPU build of torch; the index does not carry it, so give pip --find-links with the "
            "wheel's folder."
        ),
    )
    path.write_text(
        header
        + f"torch=={version}+cpu"
        + "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(known))
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("install", "update"))
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="update: take newer releases too, not only what changed in the .in files",
    )
    parsed = parser.parse_args(arguments)
    given = os.environ.get("TORCH_WHEELS")
    wheels = Path(given).resolve() if given else None
    try:
        if parsed.action == "install":
            install(wheels)
        else:
            update(wheels, upgrade=parsed.upgrade)
    except subprocess.CalledProcessError as error:
        print(
            f"error: {shlex.join(error.cmd[:4])} … ended with {error.returncode}; its own "
            "message stands above.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

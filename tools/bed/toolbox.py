"""Builds the Go programs of the bed once. Versions are pinned in tools/; binaries are in the cache."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bed.places import cache
from bed.shell import BedError, last_lines, run

SOURCES = Path(__file__).with_name("tools")
_VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Tool:
    """One folder of tools/: its binaries, and the names of the binaries."""

    packages: dict[str, str]  # binary → Go package
    links: tuple[str, ...] = ()  # additional names of the (only) binary
    link_flags: str = "-s -w"
    minutes: str = "under a minute"
    sources: Path | None = None  # the folder, if it is not in tools/


TOOLS = {
    "kubernetes": Tool(
        {"kubernetes": "."},
        (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        ),
        f"-s -w -X {_VERSION}.gitVersion=v1.34.4 -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=34"
        f" -X {_VERSION}.gitTreeState=clean",
        "6 to 10 minutes on two cores",
    ),
    # Use different names, because `kube-apiserver` is always the binary above.
    "kubernetes-next": Tool(
        {"kubernetes-next": "."},
        ("kube-apiserver-next", "kube-controller-manager-next", "kube-scheduler-next"),
        f"-s -w -X {_VERSION}.gitVersion=v1.37.0 -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=37"
        f" -X {_VERSION}.gitTreeState=clean",
        "5 to 10 minutes on two cores",
    ),
    "etcd": Tool(
        {"etcd": "go.etcd.io/etcd/server/v3", "etcdctl": "go.etcd.io/etcd/etcdctl/v3"}
    ),
    "coredns": Tool({"coredns": "."}, minutes="1 to 3 minutes"),
    "pause": Tool({"pause": "."}),
    # Use one module for both, so that the chart's tests render with this Helm and share its compiled code.
    "helm": Tool(
        {
            "helm": "helm.sh/helm/v3/cmd/helm",
            "helm-unittest": "github.com/helm-unittest/helm-unittest/cmd/helm-unittest",
        },
        minutes="1 to 3 minutes",
    ),
    "coscheduling": Tool({"gang-scheduler": "."}, minutes="1 to 6 minutes"),
    "chart-testing": Tool({"ct": "github.com/helm/chart-testing/v3/ct"}),
    "actionlint": Tool({"actionlint": "github.com/rhysd/actionlint/cmd/actionlint"}),
    "kubeconform": Tool({"kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"}),
    "kueue": Tool(
        {"kueue-manager": "sigs.k8s.io/kueue/cmd/kueue"},
        minutes="4 to 8 minutes on two cores",
    ),
    "kwok": Tool({"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, minutes="1 to 3 minutes"),
    "kstatus": Tool({"kstatus": "."}),
    "celcost": Tool({"celcost": "."}, minutes="1 to 5 minutes"),
    "kubeyaml": Tool({"kubeyaml": "."}),
    "lua": Tool({"lua": "."}),
    "argolua": Tool({"argolua": "."}, ("argosync",), minutes="2 to 6 minutes"),
    "fluxhealth": Tool({"fluxhealth": "."}, minutes="1 to 4 minutes"),
    # The module does not contain the pages of the web UI. The API is complete.
    "prometheus": Tool(
        {
            "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
            "promtool": "github.com/prometheus/prometheus/cmd/promtool",
        },
        link_flags="-s -w -X github.com/prometheus/common/version.Version=3.5.0",
        minutes="4 to 10 minutes on two cores",
    ),
    "promconfig": Tool({"promconfig": "."}, minutes="2 to 5 minutes"),
}
NEEDED = {
    "full": ("kubernetes", "etcd", "coredns", "pause"),
    "next": ("kubernetes", "kubernetes-next", "etcd", "coredns", "pause"),
    "kwok": ("kubernetes", "etcd", "kwok"),
}
BINARIES = {
    name: tool for tool, entry in TOOLS.items() for name in (*entry.packages, *entry.links)
}


def tool_of(name: str) -> str:
    """Return the tool that contains this binary or has this name. Raises ValueError with the known names."""
    if name in TOOLS:
        return name
    if name in BINARIES:
        return BINARIES[name]
    raise ValueError(
        f"{name}: no tool of the bed. Known: {', '.join(sorted({*TOOLS, *BINARIES}))}."
    )


def binary(name: str) -> Path:
    """Return the path of a binary, for example `kubectl` or `helm`. Build it if it is not cached."""
    return build(tool_of(name)) / name


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the tools that the cache does not have."""
    return [name for name in names if _built(name) is None]


def unavailable(name: str) -> str | None:
    """Return why a binary is not available, as the reason of a skipped test, or None if it is available."""
    if shutil.which("go") is None and missing((tool_of(name),)):
        return f"{name} is not built, and there is no `go` to build it."
    return None


def ask(name: str, question: Any, *, timeout: float = 120) -> Any:
    """Send a question to a binary, and return its answer, both as JSON. Build the binary if it is missing.

    ``timeout``: time limit of the answer in seconds, without the build. Raises BedError with the binary's
    output if its exit code is not 0.
    """
    return json.loads(run([binary(name)], text=json.dumps(question), timeout=timeout))


def build(name: str) -> Path:
    """Return the folder of the tool's binaries. Build them if the cache does not have them.

    Raises BedError with the compiler's output if the build fails.
    """
    found = _built(name)
    if found is not None:
        return found
    version = _go_version()
    if version is None:
        raise BedError(
            f"{name}: not in {cache() / 'tools'}, and there is no `go` to build it. Install Go 1.24 or newer."
        )
    folder = cache() / "tools" / f"{name}-{key(name)}-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bin").is_dir():  # another process may have built it meanwhile
            _build_into(name, folder)
    return folder / "bin"


def _build_into(name: str, folder: Path) -> None:
    tool = TOOLS[name]
    begun = time.monotonic()
    print(f"{time.strftime('%T')}  {name}: building ({tool.minutes}) …", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        output = Path(scratch, "bin")
        output.mkdir()
        for target, package in tool.packages.items():
            _go_build(name, tool, package, output / target)
        for link in tool.links:
            (output / link).symlink_to(next(iter(tool.packages)))
        folder.mkdir(exist_ok=True)
        output.rename(folder / "bin")
    size = sum(
        file.stat().st_size for file in (folder / "bin").iterdir() if not file.is_symlink()
    )
    print(
        f"{time.strftime('%T')}  {name}: built in {time.monotonic() - begun:.0f} s, {size / 1e6:.0f} MB",
        flush=True,
    )


def _go_build(name: str, tool: Tool, package: str, target: Path) -> None:
    log = target.parent.parent / "log"
    command = [
        "go",
        "build",
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        "-ldflags",
        tool.link_flags,
        "-o",
        str(target),
    ]
    # With Go's default (100) a third of the compiler's processor time goes into its garbage collector:
    # kubeconform took 68 s of two cores, and with 400 it took 46 s.
    environment = {
        "GOGC": "400",
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "",
        "GOWORK": "off",
    }
    with open(log, "w") as out:
        code = subprocess.call(
            [*command, package],
            cwd=_folder(name),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    if code != 0:
        raise BedError(
            f"{name}: `go build {package}` failed with exit code {code}.\n{last_lines(log)}"
        )


def module(name: str, path: str) -> Path:
    """Return the folder of a Go module that a tool pins, with all its published files."""
    words = ["go", "mod", "download", "-json", path]
    found = json.loads(run(words, directory=_folder(name), environment={"GOWORK": "off"}))
    return Path(found["Dir"])


def key(name: str) -> str:
    """Return a digest of everything that determines the binary, except Go's version."""
    digest = hashlib.sha256(
        repr(TOOLS[name].packages).encode() + TOOLS[name].link_flags.encode()
    )
    for file in sorted(_folder(name).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _folder(name: str) -> Path:
    return (TOOLS[name].sources or SOURCES) / name


def _built(name: str) -> Path | None:
    version = _go_version()
    pattern = f"{name}-{key(name)}-{version or '*'}/bin"  # without Go, accept any build of these sources
    return next(iter(sorted((cache() / "tools").glob(pattern))), None)


def _go_version() -> str | None:
    if shutil.which("go") is None:
        return None
    return run(["go", "env", "GOVERSION"], directory=SOURCES / "kubernetes").strip()

"""The locks are complete, hashed, in step with what they were made from, and the right build of torch is
chosen."""

import importlib.util
import platform
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

LOCKS = ("trainer.txt", "torch.txt", "torch-cpu.txt", "operator.txt", "dev.txt")


@pytest.fixture(scope="module")
def locks(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "requirements_locks", root / "tools/requirements" / "locks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while it is being executed
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def named(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_is_exact_and_has_hashes(
    lock: str, root: Path, locks: ModuleType
) -> None:
    text = (root / "tools/requirements" / lock).read_text()
    pins = locks.parse_lock(text)
    starts = [
        line for line in text.splitlines() if line and not line.startswith((" ", "#"))
    ]
    assert len(pins) == len(starts) > 0
    assert [pin.name for pin in pins if not locks.hashes(pin.text)] == []
    assert not re.search(r"^\s*--(?!hash)|://", text, re.MULTILINE)


def test_no_package_is_in_two_locks_except_torch_builds_and_shared_dependencies(
    root: Path, locks: ModuleType
) -> None:
    pins = [
        {
            pin.name: pin
            for pin in locks.parse_lock((root / "tools/requirements" / lock).read_text())
        }
        for lock in LOCKS
    ]
    trainer, torch, torch_cpu, operator, dev = (set(one) for one in pins)
    assert torch & torch_cpu == {"torch"} == torch_cpu
    assert trainer & (torch | dev) == torch & dev == operator & (torch | dev) == set()
    assert [
        name for name in trainer & operator if pins[0][name].text != pins[3][name].text
    ] == []


def test_both_builds_of_torch_are_the_same_release(root: Path, locks: ModuleType) -> None:
    (index,) = (
        pin
        for pin in locks.parse_lock((root / "tools/requirements" / "torch.txt").read_text())
        if pin.name == "torch"
    )
    (cpu,) = locks.parse_lock((root / "tools/requirements" / "torch-cpu.txt").read_text())
    assert cpu.version == f"{index.version}+cpu"
    assert locks.hashes(cpu.text).isdisjoint(locks.hashes(index.text))


def test_packages_for_cuda_only_are_locked_separately_and_only_for_linux(
    root: Path, locks: ModuleType
) -> None:
    cuda = [
        pin
        for pin in locks.parse_lock((root / "tools/requirements" / "torch.txt").read_text())
        if pin.name != "torch"
    ]
    assert {"triton", "nvidia-nccl-cu13"} <= {pin.name for pin in cuda}
    assert [
        pin.name
        for pin in cuda
        if "sys_platform == 'linux'" not in pin.text.splitlines()[0]
    ] == []
    other = (root / "tools/requirements" / "trainer.txt").read_text() + (
        root / "tools/requirements" / "dev.txt"
    ).read_text()
    assert not re.search(r"^(?:nvidia-|cuda-|triton)", other, re.MULTILINE)


@pytest.mark.parametrize(
    ("source", "own_locks"),
    [
        ("trainer.in", ("trainer.txt", "torch.txt")),
        ("operator.in", ("operator.txt",)),
        ("dev.in", LOCKS),
    ],
)
def test_everything_named_in_an_in_file_is_locked(
    source: str, own_locks: tuple[str, ...], root: Path, locks: ModuleType
) -> None:
    pinned: dict[str, set[str]] = {}
    for lock in own_locks:
        for pin in locks.parse_lock((root / "tools/requirements" / lock).read_text()):
            pinned.setdefault(normalised(pin.name), set()).add(pin.version)
    for wanted in named(root / "tools/requirements" / source):
        versions = pinned.get(normalised(wanted.name), set())
        assert versions, f"{wanted.name} is in {source} and in no lock; run make lock"
        assert all(
            wanted.specifier.contains(version, prereleases=True) for version in versions
        )


@pytest.mark.parametrize(
    ("folders", "source", "own_locks"),
    [
        (
            ("trainer_image", "latent_edit", "manifest", "cli"),
            "trainer.in",
            ("trainer.txt", "torch.txt"),
        ),
        (("operator", "manifest"), "operator.in", ("operator.txt",)),
    ],
)
def test_a_package_and_its_in_file_agree_and_the_locks_satisfy_its_bounds(
    folders: tuple[str, ...],
    source: str,
    own_locks: tuple[str, ...],
    root: Path,
    locks: ModuleType,
) -> None:
    projects = [
        tomllib.loads((root / one / "pyproject.toml").read_text())["project"]
        for one in folders
    ]
    lines = [line for project in projects for line in project["dependencies"]]
    # The one extra that an image has.
    lines += [
        line
        for project in projects
        for line in project.get("optional-dependencies", {}).get("lora", [])
    ]
    published = [Requirement(line) for line in lines if not line.startswith("evergrad-")]
    assert {normalised(one.name) for one in published} == {
        normalised(one.name) for one in named(root / "tools/requirements" / source)
    }
    pins = [
        pin
        for lock in own_locks
        for pin in locks.parse_lock((root / "tools/requirements" / lock).read_text())
    ]
    for wanted in published:
        versions = {
            pin.version for pin in pins if normalised(pin.name) == normalised(wanted.name)
        }
        assert versions
        assert all(version in wanted.specifier for version in versions), wanted


def test_the_extras_of_the_trainer_are_locked_within_their_bounds(
    root: Path, locks: ModuleType
) -> None:
    project = tomllib.loads((root / "trainer_image" / "pyproject.toml").read_text())[
        "project"
    ]
    extras = project["optional-dependencies"]
    pins = {
        normalised(pin.name): pin.version
        for name in ("trainer.txt", "dev.txt")
        for pin in locks.parse_lock((root / "tools/requirements" / name).read_text())
    }
    for wanted in map(
        Requirement,
        extras["lora"] + extras["parquet"] + extras["tensorboard"] + extras["zstd"],
    ):
        assert pins[normalised(wanted.name)] in wanted.specifier


LOCK = """\
# a comment
accelerate==1.0 \\
    --hash=sha256:{a}
    # via -r dev.in
cuda-toolkit==13.0 ; sys_platform == 'linux' \\
    --hash=sha256:{a}
    # via torch
numpy==2.4 ; python_full_version < '3.12' \\
    --hash=sha256:{a}
    # via
    #   -r trainer.in
    #   accelerate
numpy==2.5 ; python_full_version >= '3.12' \\
    --hash=sha256:{b}
    # via
    #   -r trainer.in
    #   accelerate
nvidia-cublas==13.1 ; sys_platform == 'linux' \\
    --hash=sha256:{a}
    # via cuda-toolkit
sympy==1.14 \\
    --hash=sha256:{a}
    # via torch
torch==2.13.0 \\
    --hash=sha256:{a} \\
    --hash=sha256:{b}
    # via
    #   -r trainer.in
    #   accelerate
""".format(a="a" * 64, b="b" * 64)


def test_one_resolution_is_split_into_four_files_without_losing_a_pin(
    locks: ModuleType,
) -> None:
    parts = locks.split_lock(locks.parse_lock(LOCK))
    names = {
        file: [f"{pin.name}=={pin.version}" for pin in locks.parse_lock(text)]
        for file, text in parts.items()
    }
    assert names == {
        "trainer.txt": ["numpy==2.4", "numpy==2.5", "sympy==1.14"],
        "torch.txt": ["cuda-toolkit==13.0", "nvidia-cublas==13.1", "torch==2.13.0"],
        "operator.txt": [],
        "dev.txt": ["accelerate==1.0"],
    }
    assert sorted("".join(parts.values()).splitlines()) == sorted(LOCK.splitlines()[1:])


def wheel_name(version: str, *, python: str | None = None) -> str:
    tag = python or f"cp{sys.version_info.major}{sys.version_info.minor}"
    system = "manylinux_2_28" if sys.platform.startswith("linux") else "macosx_14_0"
    return f"torch-{version}+cpu-{tag}-{tag}-{system}_{platform.machine()}.whl"


def test_a_folder_with_a_matching_cpu_build_is_offered_to_pip(
    tmp_path: Path, locks: ModuleType
) -> None:
    (tmp_path / wheel_name("2.13.0")).touch()
    chosen = locks.choose_torch(tmp_path, locked_version="2.13.0", installed_version=None)
    assert chosen[:2] == ["--find-links", str(tmp_path)]
    assert chosen[-1].endswith("torch-cpu.txt")


@pytest.mark.parametrize(
    "name",
    [
        wheel_name("2.12.0"),
        wheel_name("2.13.0", python="cp310"),
        "torch-2.13.0+cpu-cp311-cp311-linux_s390x.whl",
    ],
)
def test_a_cpu_build_for_another_release_python_or_machine_is_ignored_with_a_message(
    name: str, tmp_path: Path, locks: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).touch()
    chosen = locks.choose_torch(tmp_path, locked_version="2.13.0", installed_version=None)
    assert [Path(one).name for one in chosen] == ["-r", "torch.txt"]
    assert "holds no CPU build of torch 2.13.0 for this Python" in capsys.readouterr().out


def test_an_installed_cpu_build_is_kept(locks: ModuleType) -> None:
    chosen = locks.choose_torch(
        None, locked_version="2.13.0", installed_version="2.13.0+cpu"
    )
    assert [Path(one).name for one in chosen] == ["-r", "torch-cpu.txt"]


def test_without_a_folder_the_build_of_the_index_is_used(locks: ModuleType) -> None:
    chosen = locks.choose_torch(None, locked_version="2.13.0", installed_version=None)
    assert [Path(one).name for one in chosen] == ["-r", "torch.txt"]

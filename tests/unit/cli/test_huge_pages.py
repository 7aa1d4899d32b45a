"""Which commands start again with huge pages, and on which machines."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from evergrad_cli import huge_pages, main
from evergrad_cli.huge_pages import VARIABLE, choose_tunables

WANTED = "glibc.malloc.hugetlb=1"
ASKED = "always [madvise] never"


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        ("", WANTED),
        ("glibc.malloc.arena_max=2", f"glibc.malloc.arena_max=2:{WANTED}"),
        (WANTED, None),
        ("glibc.malloc.hugetlb=0", None),
        ("glibc.malloc.hugetlb=2:glibc.malloc.arena_max=2", None),
    ],
)
def test_a_huge_page_setting_of_the_user_stays_and_other_tunables_are_kept(
    present: str, chosen: str | None
) -> None:
    assert choose_tunables(present, libc="glibc 2.36", pages=ASKED) == chosen


@pytest.mark.parametrize(
    ("libc", "pages"),
    [
        ("glibc 2.34", ASKED),
        ("glibc 2.4", ASKED),
        ("", ASKED),
        ("musl 1.2", ASKED),
        ("glibc 2.36", "[always] madvise never"),
        ("glibc 2.36", "always madvise [never]"),
        ("glibc 2.36", ""),
    ],
)
def test_no_tunables_are_chosen_if_they_would_have_no_effect(libc: str, pages: str) -> None:
    assert choose_tunables("", libc=libc, pages=pages) is None


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Programs that replaced the process, on a machine whose kernel offers huge pages on request."""
    kernel = tmp_path / "enabled"
    kernel.write_text(ASKED + "\n", encoding="ascii")
    monkeypatch.setattr(huge_pages, "_KERNELS_CHOICE", kernel)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.setattr(
        sys, "orig_argv", ["python3", "-m", "evergrad_cli", "run", "a.yaml"]
    )
    monkeypatch.setenv(VARIABLE, "glibc.malloc.arena_max=2")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    return calls


def test_the_same_command_is_executed_again_with_the_tunables_and_the_environment(
    begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "kept")
    huge_pages.begin_anew_with_huge_pages()
    ((program, arguments, environment),) = begun
    assert program == sys.executable
    assert arguments == [sys.executable, "-m", "evergrad_cli", "run", "a.yaml"]
    assert environment[VARIABLE] == f"glibc.malloc.arena_max=2:{WANTED}"
    assert environment["OTHER"] == "kept"


def test_a_process_with_huge_pages_is_not_replaced_again(
    begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, WANTED)
    huge_pages.begin_anew_with_huge_pages()
    assert begun == []


def test_a_command_continues_if_it_cannot_be_executed_again(
    begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> NoReturn:
        begun.append(arguments)
        raise PermissionError

    monkeypatch.setattr(os, "execve", refuse)
    huge_pages.begin_anew_with_huge_pages()
    assert len(begun) == 1


def test_only_programs_that_train_are_executed_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(main, "begin_anew_with_huge_pages", lambda: asked.append("anew"))
    for command in ("run", "node", "evaluate", "validate", "list"):
        monkeypatch.setattr(sys, "argv", ["evergrad", command, "--help"])
        with pytest.raises(SystemExit):
            main.main()
        # A caller from Python has its own process, which must not be replaced.
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
    assert asked == ["anew"] * 3
    capsys.readouterr()

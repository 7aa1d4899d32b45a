"""The site's navigation contains each page once, and its hooks find links and elements that load from other
hosts.

`make docs` checks in a separate environment that the site builds.
"""

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def hooks(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "site_hooks", root / "tools/docs/site_hooks.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of libraries that are not installed here."""


_Loader.add_multi_constructor(
    "tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix
)


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in (
        nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    ):
        yield from pages_of(inner)


def test_the_navigation_has_every_page_once(root: Path, hooks: ModuleType) -> None:
    config = yaml.load((root / "mkdocs.yml").read_text("utf-8"), Loader=_Loader)
    named = Counter(pages_of(hooks.expand_folders(config["nav"])))
    pages = {
        page.relative_to(root).as_posix()
        for pattern in (*hooks.OUTSIDE, "docs/**/*.md")
        for page in root.glob(pattern)
    }
    assert set(named) == pages
    assert [page for page, count in named.items() if count > 1] == []


def folders_of(nav: Any, folder: str = "docs") -> Iterator[tuple[str, str]]:
    """Each page of docs/ in a navigation, with the folder that the titles of its sections name."""
    if isinstance(nav, str):
        yield nav, folder
    elif isinstance(nav, list):
        for inner in nav:
            yield from folders_of(inner, folder)
    else:
        ((title, inner),) = nav.items()
        is_section = isinstance(inner, list)
        yield from folders_of(inner, f"{folder}/{title.lower()}" if is_section else folder)


def test_a_section_of_the_navigation_has_the_pages_of_the_folder_of_its_name(
    root: Path, hooks: ModuleType
) -> None:
    config = yaml.load((root / "mkdocs.yml").read_text("utf-8"), Loader=_Loader)
    elsewhere = {
        page: folder
        for page, folder in folders_of(hooks.expand_folders(config["nav"]))
        if page.startswith("docs/") and Path(page).parent.as_posix() not in (folder, "docs")
    }
    assert elsewhere == {}


def sections_of(page: str) -> dict[str, list[str]]:
    """The targets of the links in each section of a page, by the section's title."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {
        title: re.findall(r"\]\(([^)#]+)\)", text)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_index_has_every_page_of_a_folder_in_the_section_of_its_name(
    root: Path,
) -> None:
    sections = sections_of((root / "docs/README.md").read_text("utf-8"))
    pages = {
        page.relative_to(root / "docs").as_posix() for page in root.glob("docs/*/**/*.md")
    }
    # The first page of these folders lists the others.
    lists = ("runbooks/", "decisions/")
    expected = {
        page for page in pages if not page.startswith(lists) or page.endswith("/README.md")
    }
    missing = {
        page
        for page in expected
        if page not in sections.get(page.split("/")[0].capitalize(), [])
    }
    assert missing == set()


def test_the_home_page_begins_with_a_picture_two_commands_and_the_sections(
    root: Path, hooks: ModuleType
) -> None:
    config = yaml.load((root / "mkdocs.yml").read_text("utf-8"), Loader=_Loader)
    home, *sections = config["nav"]
    assert home == {"Home": hooks.HOME}
    begin = (root / hooks.HOME).read_text("utf-8").split("\n## ", 1)[0]
    assert begin.count("![") == 1
    commands = re.findall(r"^```sh\n(.*)\n```$", begin, flags=re.MULTILINE)
    assert commands == ["make run", "kubectl apply -f examples/quickstart/"]
    entries = re.findall(r"^- \[(\w+)\]", begin, flags=re.MULTILINE)
    assert entries == [title for section in sections for title in section]


def test_linked_files_of_a_page_are_found_and_pages_and_urls_are_not(
    root: Path, hooks: ModuleType
) -> None:
    found = hooks.find_linked_files(root / "README.md")
    assert "docs/pictures/recovery.svg" in found and "LICENSE" in found
    assert [path for path in found if path.endswith(".md") or "://" in path] == []


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.com/a.js">',
        "<img alt=x src=//example.com/a.png>",
        '<link rel="stylesheet" href="https://fonts.example.com/a.css">',
    ],
)
def test_content_from_another_host_is_detected(hooks: ModuleType, html: str) -> None:
    assert len(hooks.find_foreign(f"<p>before</p>{html}")) == 1


@pytest.mark.parametrize(
    "html",
    [
        '<script src="assets/a.js">',
        '<a href="https://example.com">',
        '<link rel="canonical" href="https://example.com/">',
    ],
)
def test_links_and_own_files_of_the_site_load_nothing_from_another_host(
    hooks: ModuleType, html: str
) -> None:
    assert hooks.find_foreign(html) == []


def test_the_build_fails_at_a_warning(root: Path) -> None:
    # With --quiet MkDocs counts no warnings, and --strict has no effect.
    (command,) = [
        line
        for line in (root / "Makefile").read_text("utf-8").splitlines()
        if "mkdocs build" in line
    ]
    assert (
        "--strict" in command and "--quiet" not in command and "-q" not in command.split()
    )
    config = yaml.load((root / "mkdocs.yml").read_text("utf-8"), Loader=_Loader)
    assert set(config["validation"].values()) == {"warn"}
    assert len(config["validation"]) == 5

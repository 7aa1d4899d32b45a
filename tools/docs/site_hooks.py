"""Hooks of MkDocs for `make docs`: every page except the home page keeps its path in the repository, and
a built page loads nothing from other hosts.

MkDocs publishes one folder, docs/. README, CHANGELOG, the examples and the results of benchmarks are outside
this folder, and pages link to them and to sources. With their paths in the repository, all of these links
resolve, and MkDocs can check them.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:  # tests read this file where MkDocs is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "*.md",
    "tools/benchmarks/README.md",
    "tools/benchmarks/results/*.md",
    "charts/*/README.md",
    "examples/*/README.md",
)
HOME = "docs/README.md"
"""The page at the root of the site. On the repository's host, README.md has that role."""
PLACES = {HOME: "index.html", "README.md": "README/index.html"}
"""Files of the site whose path is not that of the repository."""
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_NAMED_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)\)")
_FOREIGN = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"
)
_log = logging.getLogger("mkdocs.hooks.site")
"""A child of the logger `mkdocs`, for which a warning fails a strict build."""


def find_linked_files(page: Path) -> set[str]:
    """Return the paths of files in the repository, except pages, that a page links to."""
    targets = (unquote(target) for target in _LINK.findall(page.read_text("utf-8")))
    folder = page.parent.relative_to(ROOT).as_posix()
    paths = {
        posixpath.normpath(posixpath.join(folder, target))
        for target in targets
        if "://" not in target and not target.startswith("mailto:")
    }
    return {
        path
        for path in paths
        if not path.endswith(".md")
        and not path.startswith("..")
        and (ROOT / path).is_file()
    }


def find_foreign(html: str) -> list[str]:
    """Return the elements of a built page that make a browser load something from another host."""
    return _FOREIGN.findall(html)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace entries of the navigation such as ``docs/runbooks/*`` by the pages of this folder."""
    config.nav = expand_folders(config.nav)
    return config


def expand_folders(nav: Any) -> Any:
    """Return a navigation in which each pattern is replaced by its pages, sorted by name."""
    if isinstance(nav, dict):
        return {title: expand_folders(inner) for title, inner in nav.items()}
    if isinstance(nav, list):
        return [expand_folders(inner) for inner in nav]
    if not nav.endswith("/*"):
        return nav
    pages = sorted(
        (ROOT / nav).parent.glob("*.md"),
        key=lambda page: (page.name != "README.md", page.name),
    )
    return [page.relative_to(ROOT).as_posix() for page in pages]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Return the pages under their paths in the repository, and the files that they link to."""
    from mkdocs.structure.files import File, Files, InclusionLevel

    docs = Path(config.docs_dir)
    pages = {path for pattern in OUTSIDE for path in ROOT.glob(pattern)}
    found = []
    for file in files:
        inside = file.abs_src_path and Path(file.abs_src_path).is_relative_to(docs)
        if not inside:
            found.append(file)  # the theme's own
        elif file.is_documentation_page():
            pages.add(Path(str(file.abs_src_path)))
    linked = {path for page in pages for path in find_linked_files(page)}
    wanted = {page.relative_to(ROOT).as_posix() for page in pages} | linked
    ours = [
        File.generated(
            config, path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.INCLUDED
        )
        for path in sorted(wanted)
    ]
    for file in ours:
        file.dest_uri = PLACES.get(file.src_uri, file.dest_uri)
    return Files([*found, *ours])


def unlink_folders(text: str, folder: Path) -> str:
    """Return a page's text in which links to folders are replaced by their names, because a site has no
    folders."""
    return _NAMED_LINK.sub(
        lambda found: found[1] if (folder / unquote(found[2])).is_dir() else found[0], text
    )


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Return the page without links to folders. The home page has no columns at its sides."""
    if page.file.src_uri == HOME:
        page.meta["hide"] = ["navigation", "toc"]
    return unlink_folders(markdown, (ROOT / page.file.src_uri).parent)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Log a warning for each element that would load something from another host."""
    for element in find_foreign(output):
        _log.warning(
            "%s: %s: loads from another host; pages are to be readable without a network. "
            "Keep a copy in the repository.",
            page.file.src_uri,
            element,
        )
    return output

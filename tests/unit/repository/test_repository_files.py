"""Rules for the repository's files: folders, links, sizes, and no paths of a developer's machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

PRODUCT = (
    "common",
    "coordinator",
    "manifest",
    "operator",
    "cli",
    "trainer_image",
    "chaos",
    "latent_edit",
    "tools/monitoring",
    "tools/requirements",
    "tools/release",
    "examples",
)


def python_files(
    texts: dict[Path, str], root: Path, folders: tuple[str, ...]
) -> dict[str, str]:
    inside = {
        file.relative_to(root): text for file, text in texts.items() if file.suffix == ".py"
    }
    beginnings = tuple(f"{folder}/" for folder in folders)
    return {
        file.as_posix(): text
        for file, text in inside.items()
        if file.as_posix().startswith(beginnings)
    }


def test_operator_is_a_plain_folder_that_python_never_imports(root: Path) -> None:
    assert not list((root / "operator").glob("__*__.py"))


def test_the_operator_module_of_the_standard_library_is_found_from_the_root(
    root: Path,
) -> None:
    # Run Python without PYTHONSAFEPATH, like a user who does not know the variable: the root is on the import
    # path.
    code = "import collections, operator; operator.itemgetter(0); print(operator.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not Path(result.stdout.strip()).is_relative_to(root / "operator")


def test_every_folder_that_contributing_names_exists(root: Path) -> None:
    text = (root / "CONTRIBUTING.md").read_text("utf-8")
    tree = text.partition("## Where things are\n")[2].split("```")[1]
    package, missing = "", []
    for line in tree.strip().splitlines():
        if line.startswith(" "):
            names = re.findall(r"(?<!\S)([\w.]+)/(?=[\s,])", line)
            missing += [name for name in names if not [*root.glob(f"{package}/*/{name}")]]
        else:
            names = [name.rstrip("/") for name in line.split("  ")[0].split()]
            package = names[0]
            missing += [name for name in names if not (root / name).is_dir()]
        assert names, line
    assert missing == []


def test_every_relative_link_in_a_markdown_file_resolves(texts: dict[Path, str]) -> None:
    broken = []
    for file, text in texts.items():
        if file.suffix == ".md":
            targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
            broken += [
                f"{file.name}: {target}"
                for target in targets
                if "://" not in target and not (file.parent / target).exists()
            ]
    assert broken == []


def test_no_file_contains_a_local_path_or_the_host_of_a_package_index(
    texts: dict[Path, str], root: Path
) -> None:
    # Written so that this file does not match itself. An invented home directory in a test is not a real
    # path.
    own = "|".join(
        re.escape(f"{path}/") for path in (root, Path.home()) if len(path.parts) > 2
    )
    machine = r"(?<![\w.])/(?:work|farm|root|Users)/" + (f"|{own}" if own else "")
    host = r"py(?:thon)?(?:pi|hosted)\.org|registry\.(?:npmjs|yarnpkg)|proxy\.golang"
    host += r"|(?:deb|security)\.debian\.org|download\.pytorch"
    pattern = re.compile(f"{machine}|{host}")
    hits = []
    for file, text in texts.items():
        lines = text.splitlines()
        hits += [
            f"{file.relative_to(root)}:{number}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    assert hits == []


def test_no_tracked_file_is_large(tracked: list[Path], root: Path) -> None:
    assert [
        str(file.relative_to(root)) for file in tracked if file.stat().st_size > 2_000_000
    ] == []


def test_common_and_coordinator_import_only_the_standard_library_and_each_other(
    texts: dict[Path, str], root: Path
) -> None:
    foreign = []
    for name, text in python_files(texts, root, ("common", "coordinator")).items():
        for node in ast.walk(ast.parse(text)):
            modules = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            )
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {module.partition(".")[0] for module in modules}
            foreign += [
                f"{name}: {top}"
                for top in tops
                - sys.stdlib_module_names
                - {"evergrad_common", "evergrad_coordinator"}
            ]
    assert foreign == []


def test_the_product_neither_reads_nor_writes_pickles(
    texts: dict[Path, str], root: Path
) -> None:
    hits = []
    for name, text in python_files(texts, root, PRODUCT).items():
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            keywords = (
                {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if isinstance(node, ast.Call)
                else {}
            )
            # These files represent other people's scripts, which save as the library documents; loading them
            # never executes code.
            is_harmless = (
                called in {"torch.load", "torch.save"}
                and keywords.get("weights_only", "True") == "True"
            )
            if is_harmless and name.startswith("examples/scripts/"):
                continue
            if (
                called in {"torch.load", "torch.save"}
                or keywords.get("trust_remote_code", "False") != "False"
            ):
                hits.append(f"{name}:{node.lineno} {called}")
    assert hits == []


def test_the_license_is_the_full_apache_2(root: Path) -> None:
    text = (root / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "9. Accepting Warranty or Additional Liability." in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_only_recipes_name_a_recipe(texts: dict[Path, str], root: Path) -> None:
    from evergrad_manifest.training import RECIPES

    trainer = {
        name: text
        for name, text in python_files(texts, root, ("trainer_image",)).items()
        if "/recipes/" not in name
    }
    words = re.compile(rf"\b({'|'.join(RECIPES)})\b", re.IGNORECASE)
    assert "trainer_image/evergrad_trainer/training/loop.py" in trainer
    assert [name for name, text in trainer.items() if words.search(text)] == []

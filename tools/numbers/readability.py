"""Reports measurable properties of the product's code: sizes, density, comments, fragments, long lines,
import cycles.

``python tools/numbers/readability.py [COMMIT …]`` prints one table per commit, or one table of the working
tree without arguments. ``--since COMMIT`` adds the trend since that commit. Tests, benchmarks and examples
are left out. It is only a report: no number fails a build.
"""

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_LINE = 110
MAX_PARAMETERS = 6
"""A function with more parameters should use a frozen dataclass."""
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True)
class Function:
    """One ``def``, with its size from the first to the last line."""

    where: str
    name: str
    lines: int
    num_parameters: int


@dataclass(frozen=True)
class Class:
    """One class, with its size and its public methods and properties."""

    where: str
    name: str
    lines: int
    num_public: int


@dataclass(frozen=True)
class Numbers:
    """Counts of a set of modules."""

    modules: int
    lines: int
    median_function: float
    p90_function: float
    longest_function: str
    functions_over_60_lines: int
    functions_over_6_parameters: int
    longest_class: str
    classes_over_250: int
    most_public_methods: str
    tokens_per_code_line: float
    comments_per_100_code_lines: float
    private_functions_called_once_percent: float
    lines_over_110_percent: float
    longest_module: str


def count(texts: Mapping[str, str]) -> Numbers:
    """Return the counts of some modules, which are given by path."""
    functions = [
        one for where, text in texts.items() for one in find_functions(where, text)
    ]
    classes = [one for where, text in texts.items() for one in find_classes(where, text)]
    sizes = sorted(one.lines for one in functions) or [0]
    tokens = code_lines = comments = 0
    for text in texts.values():
        found = count_tokens(text)
        tokens, code_lines, comments = (
            tokens + found[0],
            code_lines + found[1],
            comments + found[2],
        )
    lines = [line for text in texts.values() for line in text.splitlines()]
    once = [name for text in texts.values() for name in find_private_called_once(text)]
    function = max(functions, key=lambda one: one.lines, default=None)
    largest = max(classes, key=lambda one: one.lines, default=None)
    widest = max(classes, key=lambda one: one.num_public, default=None)
    module = max(texts, key=lambda where: texts[where].count("\n"), default="")
    return Numbers(
        modules=len(texts),
        lines=len(lines),
        median_function=statistics.median(sizes),
        p90_function=sizes[int(0.9 * (len(sizes) - 1))],
        longest_function=f"{function.lines} {function.name}" if function else "",
        functions_over_60_lines=sum(one.lines > 60 for one in functions),
        functions_over_6_parameters=sum(
            one.num_parameters > MAX_PARAMETERS for one in functions
        ),
        longest_class=f"{largest.lines} {largest.name}" if largest else "",
        classes_over_250=sum(one.lines > 250 for one in classes),
        most_public_methods=f"{widest.num_public} {widest.name}" if widest else "",
        tokens_per_code_line=round(tokens / max(code_lines, 1), 2),
        comments_per_100_code_lines=round(100 * comments / max(code_lines, 1), 2),
        private_functions_called_once_percent=round(
            100 * len(once) / max(len(functions), 1), 1
        ),
        lines_over_110_percent=round(
            100 * sum(len(line) > MAX_LINE for line in lines) / max(len(lines), 1), 2
        ),
        longest_module=f"{texts[module].count(chr(10))} {Path(module).name}"
        if module
        else "",
    )


def find_functions(where: str, text: str) -> Iterator[Function]:
    """Yield all functions and methods of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(
                where,
                node.name,
                (node.end_lineno or node.lineno) - node.lineno + 1,
                sum(
                    one.arg not in ("self", "cls")
                    for one in (
                        *node.args.posonlyargs,
                        *node.args.args,
                        *node.args.kwonlyargs,
                    )
                ),
            )


def find_classes(where: str, text: str) -> Iterator[Class]:
    """Yield all classes of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [
                one
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            is_public = sum(not one.name.startswith("_") for one in methods)
            yield Class(
                where,
                node.name,
                (node.end_lineno or node.lineno) - node.lineno + 1,
                is_public,
            )


def count_tokens(text: str) -> tuple[int, int, int]:
    """Return the number of code tokens, of lines with such a token, and of lines with only a comment.

    Docstrings count as neither.
    """
    prose = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: Counter[int] = Counter()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT and token.start[0] not in prose:
            code[token.start[0]] += 1
    return code.total(), len(code), len(comments - code.keys())


def find_private_called_once(text: str) -> list[str]:
    """Return private functions and methods of a module whose names occur only once outside their
    definitions."""
    names: Counter[str] = Counter()
    private = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute):
            names[node.attr] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(
            "_[^_]", node.name
        ):
            private.append(node.name)
    return [name for name in private if names[name] == 1]


def find_circles(texts: Mapping[str, str]) -> list[list[str]]:
    """Return groups of modules that import each other, including imports for the type checker."""
    modules = {module_name(where): text for where, text in texts.items()}
    imports = {
        name: set(find_imports(text)) & modules.keys() for name, text in modules.items()
    }
    reach = {name: _reachable(name, imports) for name in imports}
    circles = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in reach
        if name in reach[name]
    }
    return [list(circle) for circle in sorted(circles)]


def _reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that are reachable from a module. It contains the module itself only if there is a
    cycle."""
    found: set[str] = set()
    front = set(imports[start])
    while front:
        found |= front
        front = {other for name in front for other in imports[name]} - found
    return found


def module_name(where: str) -> str:
    """Return the module's name; for example, ``cli/evergrad_cli/main.py`` returns ``evergrad_cli.main``."""
    parts = Path(where).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(text: str) -> Iterator[str]:
    """Yield the modules that a module imports at its top level, also for the type checker.

    Imports inside functions are left to import-linter.
    """
    body = list(ast.parse(text).body)
    for node in body:
        if isinstance(node, ast.If):
            body.extend(node.body)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_product(root: Path, commit: str | None) -> dict[str, str]:
    """Return the product's modules by path, of a commit or of the working tree.

    The product is every folder of the root that contains a pyproject.toml.
    """
    if commit is None:
        names = _git(root, "ls-files").decode().splitlines()
        wanted = [name for name in select_product(names) if (root / name).exists()]
        return {name: (root / name).read_text(encoding="utf-8") for name in wanted}
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", commit))) as archive:
        texts = {}
        for name in select_product(archive.getnames()):
            if (file := archive.extractfile(name)) is not None:  # not a folder
                texts[name] = file.read().decode()
    return texts


def select_product(names: Collection[str]) -> list[str]:
    """Return the files in ``names`` that are modules of a package of the root."""
    folders = {
        name.split("/")[0] for name in names if re.fullmatch(r"[^/]+/pyproject\.toml", name)
    }
    return [
        name for name in names if name.endswith(".py") and name.split("/")[0] in folders
    ]


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True
    ).stdout


def measure(texts: Mapping[str, str]) -> dict[str, Numbers]:
    """Return the counts by folder, and the counts of all."""
    groups = {
        one: {where: text for where, text in texts.items() if where.startswith(f"{one}/")}
        for one in sorted({where.split("/")[0] for where in texts})
    }
    return {
        one: count(found) for one, found in {**groups, "all": dict(texts)}.items() if found
    }


def render(tables: Mapping[str, Mapping[str, Numbers]]) -> str:
    """Return Markdown: one table per commit, with a row per measure and a column per package."""
    text = ""
    for title, table in tables.items():
        text += f"\n{title}\n\n| | {' | '.join(table)} |\n|---|{'---|' * len(table)}\n"
        for measure_name in Numbers.__dataclass_fields__:
            values = [str(getattr(one, measure_name)) for one in table.values()]
            text += f"| {re.sub('_', ' ', measure_name)} | {' | '.join(values)} |\n"
    return text.lstrip()


def render_trend(since: str, before: Numbers, now: Numbers) -> str:
    """Return Markdown: a row per measure, with its earlier value, its current value, and the difference."""
    text = f"\ntrend since {since}\n\n| | then | now | change |\n|---|---|---|---|\n"
    for name in Numbers.__dataclass_fields__:
        old, new = getattr(before, name), getattr(now, name)
        change = "" if isinstance(new, str) else f"{new - old:+g}"
        text += f"| {name.replace('_', ' ')} | {old} | {new} | {change} |\n"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "commits", nargs="*", help="commits to count (default: the working tree)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object by commit and package"
    )
    parser.add_argument("--since", metavar="COMMIT", help="print the trend since it")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[2]
    tables, circles = {}, {}
    for commit in options.commits or [None]:
        texts = read_product(root, commit)
        title = commit or "working tree"
        tables[title], circles[title] = measure(texts), find_circles(texts)
    if options.json:
        print(
            json.dumps(
                {
                    title: {name: asdict(one) for name, one in table.items()}
                    for title, table in tables.items()
                }
            )
        )
        return 0
    print(render(tables))
    if options.since:
        before = measure(read_product(root, options.since))["all"]
        print(render_trend(options.since, before, next(reversed(tables.values()))["all"]))
    for title, found in circles.items():
        print(
            f"{title}: {len(found)} import "
            f"circles{''.join(f'; {len(one)} modules: ' + ', '.join(one) for one in found)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

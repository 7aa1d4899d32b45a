"""Renames the classes of class_map.py in all Python files: definitions, imports, uses, annotations in quotes."""
import ast, re, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from class_map import CLASSES
from move_map import MODULES
ROOT = Path(sys.argv[1])
def moved(m):
    parts = m.split(".")
    for n in range(len(parts), 0, -1):
        p = ".".join(parts[:n])
        if p in MODULES:
            return ".".join([MODULES[p], *parts[n:]])
    return m
files = [p for p in subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()]
FOLDERS = ("common", "coordinator", "manifest", "operator", "cli", "trainer_image")
def module_of(p):
    f, _, inner = p.partition("/")
    if f in FOLDERS:
        return inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return None
known = {module_of(p): p for p in files if module_of(p)}
table = {}
for (m, old), new in CLASSES.items():
    # the tree may be as it was, or moved
    target = m if m in known else moved(m)
    if target not in known: print("no module", m, target); continue
    table[(target, old)] = new
# re-exports: module that imports the class
trees = {p: ast.parse((ROOT / p).read_text("utf-8")) for p in files}
for _ in range(3):
    for m, p in known.items():
        if not p.endswith("__init__.py"): continue
        for n in trees[p].body:
            if isinstance(n, ast.ImportFrom) and n.level == 0:
                for a in n.names:
                    if (n.module, a.name) in table and not a.asname:
                        table.setdefault((m, a.name), table[(n.module, a.name)])
defined = set()
changed = 0
for p in files:
    tree, text = trees[p], (ROOT / p).read_text("utf-8")
    me = module_of(p)
    names, mods, edits = {}, {}, []
    lines = text.splitlines(keepends=True)
    offs = [0]
    for l in lines: offs.append(offs[-1] + len(l.encode()))
    data = text.encode()
    pos = lambda line, col: offs[line - 1] + col
    if me:
        for n in tree.body:
            if isinstance(n, ast.ClassDef) and (me, n.name) in table:
                names[n.name] = table[(me, n.name)]; defined.add((me, n.name))
                start = pos(n.lineno, n.col_offset)
                i = data.index(b"class " + n.name.encode(), start) + 6
                edits.append((i, i + len(n.name.encode()), names[n.name]))
            if isinstance(n, (ast.Assign, ast.AnnAssign)):
                t = n.targets[0] if isinstance(n, ast.Assign) else n.target
                if isinstance(t, ast.Name) and (me, t.id) in table:
                    names[t.id] = table[(me, t.id)]; defined.add((me, t.id))
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.level == 0 and n.module:
            for a in n.names:
                if (n.module, a.name) in table:
                    new = table[(n.module, a.name)]
                    s, e = pos(a.lineno, a.col_offset), pos(a.end_lineno, a.end_col_offset)
                    edits.append((s, e, new + (f" as {a.asname}" if a.asname else "")))
                    if not a.asname: names[a.name] = new
                elif f"{n.module}.{a.name}" in known:
                    mods[a.asname or a.name] = f"{n.module}.{a.name}"
        elif isinstance(n, ast.Import):
            for a in n.names:
                if a.name in known and a.asname: mods[a.asname] = a.name
    ann = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b") if names else None
    doc = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and n.body and isinstance(n.body[0], ast.Expr)}
    quoted = set()
    for n in ast.walk(tree):
        for field in ("annotation", "returns"):
            v = getattr(n, field, None)
            if v is not None:
                for c in ast.walk(v):
                    if isinstance(c, ast.Constant) and isinstance(c.value, str): quoted.add(c)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "cast" and n.args:
            for c in ast.walk(n.args[0]):
                if isinstance(c, ast.Constant) and isinstance(c.value, str): quoted.add(c)
    for n in tree.body:
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "__all__":
            for c in ast.walk(n.value):
                if isinstance(c, ast.Constant) and c.value in names:
                    edits.append((pos(c.lineno, c.col_offset), pos(c.end_lineno, c.end_col_offset), f'"{names[c.value]}"'))
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id in names:
            edits.append((pos(n.lineno, n.col_offset), pos(n.end_lineno, n.end_col_offset), names[n.id]))
        elif isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in mods and (mods[n.value.id], n.attr) in table:
            e = pos(n.end_lineno, n.end_col_offset)
            edits.append((e - len(n.attr.encode()), e, table[(mods[n.value.id], n.attr)]))
        elif n in quoted and ann and ann.search(n.value):
            s, e = pos(n.lineno, n.col_offset), pos(n.end_lineno, n.end_col_offset)
            src = data[s:e].decode()
            edits.append((s, e, ann.sub(lambda m: names[m.group(1)], src)))
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) in doc and names:
            s, e = pos(n.lineno, n.col_offset), pos(n.end_lineno, n.end_col_offset)
            src = data[s:e].decode()
            new = re.sub(r"(``|:class:`)(" + "|".join(map(re.escape, names)) + r")(?=[`.(])", lambda m: m.group(1) + names[m.group(2)], src)
            if new != src: edits.append((s, e, new))
    seen, last = set(), None
    for s, e, t in sorted(set(edits), reverse=True):
        if last is not None and e > last: continue
        data = data[:s] + t.encode() + data[e:]; last = s
    if edits:
        out = data.decode()
        if out != text:
            (ROOT / p).write_text(out, "utf-8"); changed += 1
print(changed, "files; never found:", sorted(set(k for k in table) - defined))

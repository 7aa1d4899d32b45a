"""Moves modules and files as the table says, and rewrites imports, dotted names and paths in all tracked texts."""
import ast, os, re, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from move_map import MODULES, SOURCES

ROOT = Path(sys.argv[1])
run = lambda *a: subprocess.run(a, cwd=ROOT, check=True, capture_output=True, text=True).stdout

def new(m):
    parts = m.split('.')
    for n in range(len(parts), 0, -1):
        p = '.'.join(parts[:n])
        if p in MODULES:
            return '.'.join([MODULES[p], *parts[n:]])
    return m

def place(m):
    return f"{SOURCES[m.split('.')[0]]}/{m.replace('.', '/')}"

tracked = [p for p in run('git', 'ls-files').splitlines()]
# 1. which files move
moves = {}
for p in tracked:
    for pkg, folder in SOURCES.items():
        pre = f"{folder}/{pkg}/"
        if p.startswith(pre):
            rel = p[len(folder) + 1:]
            if p.endswith('.py'):
                dotted = rel[:-3].replace('/', '.')
                is_pkg = dotted.endswith('.__init__')
                d = dotted.removesuffix('.__init__')
                n = new(d)
                q = place(n) + ('/__init__.py' if is_pkg else '.py')
            else:
                d = os.path.dirname(rel).replace('/', '.')
                q = place(new(d)) + '/' + os.path.basename(rel)
            if q != p:
                moves[p] = q

# 2. rewrite texts
names = sorted(MODULES, key=len, reverse=True)
dotted_re = re.compile(r'(?<![\w.§])(' + '|'.join(re.escape(n) for n in names) + r')(?![\w])')
# in paths and ids such as evergrad_trainer/worker/life.py
path_map = {}
for a, b in moves.items():
    path_map[a] = b
    for folder in SOURCES.values():
        pass
    path_map[a.split('/', 1)[1]] = b.split('/', 1)[1]
path_re = re.compile(r'(?<![\w/.-])(?:\./)?(' + '|'.join(re.escape(n) for n in sorted(path_map, key=len, reverse=True)) + r')(?![\w/])')

def split_from(text):
    """``from PKG import a, b`` where a or b are modules that move; module-qualified names in the file are renamed."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = text.splitlines(keepends=True)
    offs = [0]
    for l in lines:
        offs.append(offs[-1] + len(l.encode()))
    data = text.encode()
    pos = lambda line, col: offs[line - 1] + col
    edits, renames = [], {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and node.module.split('.')[0] in SOURCES):
            continue
        groups, changed = {}, False
        for alias in node.names:
            full = f'{node.module}.{alias.name}'
            if full in MODULES:
                target = MODULES[full]
                pkg, _, base = target.rpartition('.')
                changed = True
                if alias.asname:
                    item = f'{base} as {alias.asname}'
                elif base != alias.name:
                    item = base
                    renames[alias.name] = base
                else:
                    item = base
                groups.setdefault(pkg, []).append((alias, item))
            else:
                mod = new(node.module) if node.module in MODULES or any(node.module.startswith(k + '.') for k in MODULES) else node.module
                item = alias.name + (f' as {alias.asname}' if alias.asname else '')
                groups.setdefault(mod, []).append((alias, item))
        if not changed:
            continue
        indent = ' ' * node.col_offset
        out = []
        for pkg, items in groups.items():
            out.append(f"from §{pkg} import {', '.join(i for _, i in items)}")
        edits.append((pos(node.lineno, node.col_offset), pos(node.end_lineno, node.end_col_offset), ('\n' + indent).join(out)))
    if renames:
        bound = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | bound
        for old, to in list(renames.items()):
            if old in bound or (to in used):
                # keep the old word in this file
                edits = [(a, b, re.sub(rf'(import |, ){to}(?=,|$)', rf'\g<1>{to} as {old}', t)) for a, b, t in edits]
                print('  as', ROOT, old, to)
                del renames[old]
        for n in ast.walk(tree):
            if isinstance(n, ast.Name) and n.id in renames:
                edits.append((pos(n.lineno, n.col_offset), pos(n.end_lineno, n.end_col_offset), renames[n.id]))
    for a, b, t in sorted(edits, reverse=True):
        data = data[:a] + t.encode() + data[b:]
    return data.decode()

count = 0
SKIP = re.compile(r'^(CHANGELOG\.md|LICENSE|tools/layout/|tests/earlier/|tests/golden/|.*\.(png|svg|gz|zst|parquet|lock)$)')
for p in tracked:
    if SKIP.match(p):
        continue
    f = ROOT / p
    if f.is_symlink() or not f.is_file():
        continue
    try:
        text = f.read_text('utf-8')
    except UnicodeDecodeError:
        continue
    out = text
    if 'evergrad_' in out:
        if p.endswith('.py'):
            out = split_from(out)
        out = path_re.sub(lambda m: m.group(0).replace(m.group(1), path_map[m.group(1)]), out)
        def single(m):
            target = MODULES.get(f'{m.group(1)}.{m.group(2)}')
            if not target:
                return m.group(0)
            pkg, _, base = target.rpartition('.')
            return f'from §{pkg} import {base}' + ('' if base == m.group(2) else f' as {m.group(2)}')
        out = re.sub(r'from (evergrad_[a-z_.]+) import (\w+)(?=\\n|$|")', single, out, flags=re.M)
        out = dotted_re.sub(lambda m: MODULES[m.group(1)], out).replace('from §evergrad', 'from evergrad')
    if out != text:
        count += 1
        f.write_text(out, 'utf-8')

# 3. move
for a, b in moves.items():
    (ROOT / b).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / a).rename(ROOT / b)
run('git', 'add', '-A')
print(len(moves), 'moved', count, 'rewritten')
# 4. packages
from inits import DELETED, INITS
for folder, text in INITS.items():
    (ROOT / folder / '__init__.py').write_text(f'"""{text}"""\n')
for name in DELETED:
    (ROOT / name).unlink()
for folder in ('operator', 'cli', 'trainer_image', 'manifest', 'coordinator'):
    for path in sorted((ROOT / folder).rglob('*'), reverse=True):
        if path.is_dir() and path.name != '__pycache__' and all(p.name == '__pycache__' for p in path.iterdir()):
            subprocess.run(['rm', '-r', str(path)])
run('git', 'add', '-A')

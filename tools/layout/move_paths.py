"""Second stage: folders tools/, docs/{start,train,operate,project}, tests/integration by subject. Rewrites paths, and links of pages."""
import os, posixpath, re, subprocess, sys
from pathlib import Path

ROOT = Path(sys.argv[1])
run = lambda *a: subprocess.run(a, cwd=ROOT, check=True, capture_output=True, text=True).stdout
FOLDERS = {
    "tests/bed": "tools/bed", "benchmarks": "tools/benchmarks", "monitoring": "tools/monitoring", "release": "tools/release",
    "requirements": "tools/requirements",
}
FILES = {}
def put(folder, names, ext=".md"):
    for n in names.split():
        FILES[f"docs/{n}{ext}"] = f"{folder}/{n}{ext}"
put("tools/docs", "acceptance architectures capabilities chart_values page_pictures pictures record_walkthrough site_hooks tree", ".py")
put("docs/start", "concepts glossary installing first-hour faq comparison walkthrough")
put("docs/train", "data optimization adapters checkpoints evaluation observers elastic elastic-scripts gpu model-sizes")
put("docs/operate", "cluster cluster-cli live-page storage pruning ipv6 queues gitops upgrading tenancy profiles security monitoring troubleshooting")
put("docs/project", "releasing testing-on-kubernetes support architecture")
GROUPS = {
    "elastic": "test_chaos test_chaos_kinds test_coordinator_fuzz test_coordinator_heartbeat test_coordinator_server test_elastic_changes "
        "test_elastic_coordinator test_elastic_errors test_elastic_freezes test_elastic_groups test_elastic_losses test_elastic_members "
        "test_elastic_replicas test_elastic_resolver test_elastic_transports test_example_elastic test_ipv6 test_local_coordinator "
        "test_node_command test_rendezvous_changes test_rendezvous_losses test_rendezvous_scripts test_script_runs test_sharded_copies "
        "test_sharded_model test_sharded_modules",
    "recipes": "test_example_latent_edit test_example_preference test_example_two_stage_kl test_export_generation test_latent_edit "
        "test_latent_edit_elastic test_lora test_mixing test_own_task test_packing test_preference test_recipes_elastic test_recipes_resume "
        "test_sft test_task_without_text test_two_stage_kl test_two_stage_kl_elastic",
    "operator": "test_operator_process test_prometheus_operator test_prometheus_rules test_prometheus_scrape",
    "page": "test_open_command test_page_commands test_page_in_chromium test_readme_tour test_report_in_chromium test_example_walks",
    "helpers": "browser chaos_helpers checkpoint_processes coordinator_processes elastic_helpers elastic_processes page_site position_helpers "
        "recipe_runs rendezvous_cluster rendezvous_worker run_helpers",
}
tracked = run("git", "ls-files").splitlines()
grouped = {n: g for g, ns in GROUPS.items() for n in ns.split()}
for p in tracked:
    m = re.fullmatch(r"tests/integration/(\w+)\.py", p)
    if m and m.group(1) != "conftest":
        FILES[p] = f"tests/integration/{grouped.get(m.group(1), 'run')}/{m.group(1)}.py"
    elif p.startswith("tests/integration/run-05accba/"):
        FILES[p] = p.replace("tests/integration/", "tests/integration/run/")
moves = {}
for p in tracked:
    q = FILES.get(p)
    if q is None:
        for a, b in FOLDERS.items():
            if p.startswith(a + "/"):
                q = b + p[len(a):]
    if q:
        moves[p] = q
print(len(moves), "files;", [f for f in FILES if f not in tracked])

def place(p):
    if p in moves: return moves[p]
    for a, b in FOLDERS.items():
        if p == a or p.startswith(a + "/"): return b + p[len(a):]
    return p
# Paths from the root, in any text.
keys = sorted([*(a + "/" for a in FOLDERS), *(k for k in FILES)], key=len, reverse=True)
root_re = re.compile(r"(?<![\w./-])(\./)?(" + "|".join(map(re.escape, keys)) + r")(?=[\w.*{<…]|[`'\"\s,;:)\]]|$)")
root_re = re.compile(r"(?<![\w./-])(" + "|".join(map(re.escape, keys)) + r")")
link_re = re.compile(r"(\]\(|(?:src|href)=\")([^)\s\"#]+)((?:#[^)\s\"]*)?[)\"])")
SKIP = re.compile(r"^(CHANGELOG\.md|LICENSE|tests/earlier/|tests/golden/|.*\.(png|svg|gz|zst|parquet|lock))$|^tools/layout/")
def links(text, old, new):
    def one(m):
        t = m.group(2)
        if "://" in t or t.startswith(("/", "mailto:")): return m.group(0)
        target = posixpath.normpath(posixpath.join(posixpath.dirname(old), t))
        if not (ROOT / target).exists(): return m.group(0)
        slash = "/" if t.endswith("/") else ""
        return m.group(1) + posixpath.relpath(place(target), posixpath.dirname(new) or ".") + slash + m.group(3)
    return link_re.sub(one, text)
out = {}
for p in tracked:
    f = ROOT / p
    if SKIP.match(p) or f.is_symlink() or not f.is_file(): continue
    try: text = f.read_text("utf-8")
    except UnicodeDecodeError: continue
    new = text
    if p.endswith(".md"): new = links(new, p, place(p))
    if p.endswith(".md"):
        # outside of links only
        parts = re.split(r"(\]\([^)]*\))", new)
        new = "".join(s if s.startswith("](") else root_re.sub(lambda m: place(m.group(1).rstrip("/")) + ("/" if m.group(1).endswith("/") else ""), s) for s in parts)
    else:
        new = root_re.sub(lambda m: place(m.group(1).rstrip("/")) + ("/" if m.group(1).endswith("/") else ""), new)
    if new != text: out[p] = new
for p, t in out.items(): (ROOT / p).write_text(t, "utf-8")
for a, b in moves.items():
    (ROOT / b).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / a).rename(ROOT / b)
for a in [*FOLDERS, "docs", "tests/integration"]:
    for path in sorted((ROOT / a).rglob("*"), reverse=True):
        if path.is_dir() and all(x.name == "__pycache__" for x in path.iterdir()): subprocess.run(["rm", "-r", str(path)])
    if (ROOT / a).is_dir() and not any((ROOT / a).iterdir()): (ROOT / a).rmdir()
run("git", "add", "-A")

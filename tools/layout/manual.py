"""What the table cannot say: the new distribution evergrad-common, contracts, and lists of packages."""
import re, subprocess
from pathlib import Path

from edit import ROOT, sub

c = (ROOT / "coordinator/pyproject.toml").read_text()
(ROOT / "common/evergrad_common/py.typed").touch()
(ROOT / "common/pyproject.toml").write_text(re.sub(r"description = .*", "description = \"What Evergrad's operator, coordinator and trainer share: names, exit codes, codec, causes and the metrics catalogue.\"", c.replace("evergrad-coordinator", "evergrad-common").replace("evergrad_coordinator*", "evergrad_common*")).replace('evergrad_coordinator = ["py.typed", "web/*"]', 'evergrad_common = ["py.typed"]'))
(ROOT / "coordinator/pyproject.toml").write_text(re.sub(r"description = .*", 'description = "The coordinator of an Evergrad run: which nodes train together, and the page of the run."', c).replace("dependencies = []", 'dependencies = ["evergrad-common==0.2.0"]'))
sub("manifest/pyproject.toml", ('"evergrad-coordinator==0.2.0"', '"evergrad-common==0.2.0"'))
for f in ("operator", "cli", "trainer_image"):
    sub(f"{f}/pyproject.toml", ('    "evergrad-coordinator==0.2.0",', '    "evergrad-common==0.2.0",\n    "evergrad-coordinator==0.2.0",'))
five = '("coordinator", "manifest", "operator", "cli", "trainer_image")'
for f in ("requirements/locks.py", "tests/unit/repository/test_troubleshooting.py", "tests/evidence/capabilities.py"):
    sub(f, (five, five.replace('("', '("common", "', 1)))
sub("Makefile", ("pyproject.toml,coordinator manifest", "pyproject.toml,common coordinator manifest"), ("--editable coordinator --editable", "--editable common --editable coordinator --editable"))
for f in ("release/make_release.py", "tests/unit/repository/test_release.py"):
    sub(f, ('("coordinator", "manifest", "cli", "operator", "trainer_image")', '("common", "coordinator", "manifest", "cli", "operator", "trainer_image")'))
sub("tests/unit/repository/test_release.py", ('("coordinator", "manifest", "cli", "operator", "trainer")', '("common", "coordinator", "manifest", "cli", "operator", "trainer")'))
sub(".dockerignore", ("!coordinator\n", "!common\n!coordinator\n"))
sub("Dockerfile", ("COPY coordinator /source/coordinator", "COPY common /source/common\nCOPY coordinator /source/coordinator"), ("/source/coordinator /source/manifest", "/source/common /source/coordinator /source/manifest"))
sub("tests/bed/product_images.py", ('"operator": ("coordinator",', '"operator": ("common", "coordinator",'), ('"trainer": ("coordinator",', '"trainer": ("common", "coordinator",'))
sub("tests/unit/repository/test_chart.py", ('for package in ("coordinator", "operator", "trainer_image")', 'for package in ("common", "coordinator", "operator", "trainer_image")'))
sub("cli/evergrad_cli/main.py", ('    "evergrad_cli",\n    "evergrad_coordinator"', '    "evergrad_cli",\n    "evergrad_common",\n    "evergrad_coordinator"'))
sub("tests/unit/repository/test_repository_files.py", ('PRODUCT = (\n    "coordinator",', 'PRODUCT = (\n    "common",\n    "coordinator",'), ("def test_the_coordinator_imports_the_standard_library_and_itself_only", "def test_common_and_coordinator_import_the_standard_library_and_each_other_only"), ('python_files(texts, root, ("coordinator",))', 'python_files(texts, root, ("common", "coordinator"))'), ('tops - sys.stdlib_module_names - {"evergrad_coordinator"}', 'tops\n                - sys.stdlib_module_names\n                - {"evergrad_common", "evergrad_coordinator"}'))
sub("tests/unit/repository/test_repository_wheels.py", ("PACKAGES = {\n", 'PACKAGES = {\n    "common": "evergrad_common",\n'), ('        "evergrad-coordinator",\n        "evergrad-manifest",', '        "evergrad-common",\n        "evergrad-coordinator",\n        "evergrad-manifest",'), ('''def test_the_coordinators_wheel_asks_for_nothing(
    wheel: Callable[[str], zipfile.ZipFile],
) -> None:
    with wheel("coordinator") as archive:
        assert requirements(archive) == []''', '''def test_the_coordinators_wheel_asks_for_common_and_common_for_nothing(
    wheel: Callable[[str], zipfile.ZipFile],
) -> None:
    with wheel("coordinator") as archive:
        assert requirements(archive) == ["evergrad-common==0.2.0"]
    with wheel("common") as archive:
        assert requirements(archive) == []'''))
sub("tests/unit/repository/test_commands.py", ("|trainer_image|coordinator|", "|trainer_image|common|coordinator|"))
sub("coordinator/evergrad_coordinator/edge/heartbeat_process.py", ('with_name("beat.py")', 'with_name("heartbeat_sender.py")'))
for p in subprocess.run(["git", "grep", "-l", r"\./coordinator \./manifest"], cwd=ROOT, capture_output=True, text=True).stdout.split():
    if "CHANGELOG" not in p:
        sub(p, ("./common ./coordinator ./manifest", "./common ./common ./coordinator ./manifest"))
contracts = Path(__file__).with_name("contracts.toml").read_text()
p = ROOT / "pyproject.toml"; s = p.read_text()
s = s.replace('src = ["coordinator",', 'src = ["common", "coordinator",').replace('files = [\n    "coordinator/', 'files = [\n    "common/evergrad_common",\n    "coordinator/')
head, _, tail = s.partition("[tool.importlinter]")
# What follows the contracts, such as another tool's table, stays.
after = re.search(r"^\[+tool\.(?!importlinter)", tail, re.M)
p.write_text(head + contracts + ("\n" + tail[after.start():] if after else ""))
sub("trainer_image/evergrad_trainer/worker/worker_loop.py", ("build once, then one\nworld or many.", "build once, then\none world or many."))
sub("cli/evergrad_cli/cluster/client/errors.py", ("""        remedy = "Install it, in a clone of Evergrad: pip install ./common ./common ./coordinator ./manifest './cli[cluster]'"
""", """        packages = "./common ./common ./coordinator ./manifest './cli[cluster]'"
        remedy = f"Install it, in a clone of Evergrad: pip install {packages}"
"""))

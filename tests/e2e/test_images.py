"""Both images as a cluster would run them: any user, read-only root, no network.

The containers run on this machine, without a cluster.
"""

import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bed import images, product_images
from bed.requirements import unavailable

pytestmark = pytest.mark.timeout(3600)  # the first build fetches and compiles everything
PEOPLE = ("10001:10001", "12345:0", "2000000000:2000000000")
MANIFEST: dict[str, Any] = {
    "apiVersion": "evergrad.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "tiny"},
    "spec": {
        "training": {
            "recipe": "pretrain",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                }
            },
            "tokenizer": {"type": "byte"},
            "data": {
                "sources": [
                    {"name": "docs", "type": "jsonl", "path": "/volume/docs.jsonl"}
                ],
                "sequenceLength": 32,
            },
            "batching": {"globalBatchSize": 4, "microBatchSize": 2},
            "optimizer": {"type": "adamw", "learningRate": 1e-3},
            "horizon": {"steps": 4},
            "checkpoint": {"every": {"steps": 2}},
        }
    },
}


@pytest.fixture(scope="module")
def built() -> tuple[str, ...]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    return product_images.ensure(is_loaded=False)


@pytest.fixture
def operator_image(built: tuple[str, ...]) -> str:
    return built[0]


@pytest.fixture
def trainer_image(built: tuple[str, ...]) -> str:
    return built[1]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A folder that every user may write, with a few documents and a manifest."""
    tmp_path.chmod(0o777)
    (tmp_path / "docs.jsonl").write_text(
        "".join(
            json.dumps({"text": f"document {number} " * 20}) + "\n" for number in range(50)
        )
    )
    (tmp_path / "trainingrun.yaml").write_text(json.dumps(MANIFEST))
    return tmp_path


def podman(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["podman", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **images.environment()},
        stdin=subprocess.DEVNULL,
    )


def run_in(
    image: str,
    *words: str,
    user: str = PEOPLE[0],
    entrypoint: str | None = None,
    volume: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one container like a restricted pod."""
    name = f"evergrad-test-{uuid.uuid4().hex[:8]}"
    command = [
        "run",
        "--rm",
        "--name",
        name,
        "--network",
        "none",
        "--read-only",
        "--read-only-tmpfs=false",
        "--passwd=false",  # the user id is unknown in the image, as in a cluster
        "--user",
        user,
    ]
    command += [
        "--cap-drop",
        "all",
        "--security-opt",
        "no-new-privileges",
        "--tmpfs",
        "/tmp:rw,mode=1777,size=256m",
    ]
    command += ["--entrypoint", entrypoint] if entrypoint else []
    command += ["--volume", f"{volume}:/volume"] if volume else []
    return podman(*command, image, *words)


def output_of(image: str, *words: str, **settings: Any) -> str:
    done = run_in(image, *words, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def described(image: str) -> dict[str, Any]:
    command = ["podman", "image", "inspect", image]
    shown = subprocess.run(
        command,
        capture_output=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", **images.environment()},
    )
    (found,) = json.loads(shown.stdout)
    return dict(found)


@pytest.mark.parametrize("user", PEOPLE)
def test_the_trainer_prints_its_version_and_validates_a_run_as_any_user(
    trainer_image: str, volume: Path, user: str
) -> None:
    assert output_of(trainer_image, "--version", user=user).startswith("evergrad ")
    output_of(
        trainer_image, "validate", "/volume/trainingrun.yaml", user=user, volume=volume
    )


@pytest.mark.parametrize("user", PEOPLE[:2])
def test_the_trainer_trains_with_a_read_only_root_and_no_network(
    trainer_image: str, volume: Path, user: str
) -> None:
    output_of(
        trainer_image,
        "run",
        "/volume/trainingrun.yaml",
        "--run-directory",
        "/volume/run",
        user=user,
        volume=volume,
    )
    assert json.loads((volume / "run/complete.json").read_text())["step"] == 4


def test_the_trainer_image_has_the_packages_for_adapters(
    trainer_image: str, volume: Path
) -> None:
    adapted = ["--set", "spec.training.model={path: /volume/base, lora: {rank: 2}}"]
    run = ["run", "/volume/trainingrun.yaml", "--run-directory"]
    output_of(trainer_image, *run, "/volume/whole", volume=volume)
    export = ["checkpoint", "export", "/volume/whole", "--output", "/volume/base"]
    output_of(trainer_image, *export, volume=volume)
    output_of(trainer_image, *run, "/volume/adapted", *adapted, volume=volume)
    assert json.loads((volume / "adapted/complete.json").read_text())["step"] == 4


@pytest.mark.parametrize("user", PEOPLE)
def test_operator_and_coordinator_start_as_any_user(operator_image: str, user: str) -> None:
    assert "--all-namespaces" in output_of(operator_image, "--help", user=user)
    assert "--min" in output_of(
        operator_image,
        "-m",
        "evergrad_coordinator",
        "--help",
        user=user,
        entrypoint="python",
    )


def test_an_operator_without_a_cluster_prints_a_one_line_error(operator_image: str) -> None:
    done = run_in(
        operator_image,
        "--all-namespaces",
        "--no-lease",
        "--operator-image",
        "a:1",
        "--trainer-image",
        "b:1",
    )
    assert done.returncode == 64
    assert done.stderr.strip().splitlines()[-1].startswith("error: no API server is known")


@pytest.mark.parametrize(
    ("image", "absent"),
    [
        ("operator_image", ("torch", "transformers", "numpy", "evergrad_trainer", "pip")),
        ("trainer_image", ("kubernetes", "kopf", "evergrad_operator", "pip")),
    ],
)
def test_each_image_excludes_the_packages_of_the_other(
    image: str, absent: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    program = f"import importlib.util as u; print([n for n in {absent} if u.find_spec(n)])"
    assert (
        output_of(
            request.getfixturevalue(image), "-c", program, entrypoint="python"
        ).strip()
        == "[]"
    )


@pytest.mark.parametrize("image", ["operator_image", "trainer_image"])
def test_an_image_contains_no_compiler_no_cache_and_nothing_of_the_build_machine(
    image: str, request: pytest.FixtureRequest
) -> None:
    # The CUDA image compiles models by default.
    compiles = image == "trainer_image" and product_images.settings().torch == "cuda"
    look = (
        f"for tool in {'' if compiles else 'gcc cc g++'} clang make pip; do command -v $tool; done;"
        " find / -xdev \\( -name pip.conf -o -name .netrc -o -path '/*/.cache' -o -path '/tmp/*' "
        "-o -path '/run/secrets/*' \\)"
        " 2>/dev/null; env | grep -iE 'proxy|cert|pip_' ; true"
    )
    assert output_of(request.getfixturevalue(image), "-c", look, entrypoint="sh") == ""
    history = json.dumps(
        [
            step.get("created_by")
            for step in described(request.getfixturevalue(image))["History"]
        ]
    )
    for word in ("PIP_CERT", "proxy", "index-url=", "ca-certificates.crt"):
        assert word not in history


def test_the_base_image_can_install_the_compiler_of_the_cuda_image(
    built: tuple[str, ...],
) -> None:
    # If a CPU build of torch is available, no other test builds this image.
    script = (
        "apt-get update -q && apt-get install -q -y --simulate g++ libc6-dev python3-dev"
    )
    done = podman(
        "run", "--rm", "--network", "host", images.BASE, "sh", "-ec", script, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Inst g++ " in done.stdout


@pytest.mark.parametrize("image", ["operator_image", "trainer_image"])
def test_everything_in_an_image_is_compiled_and_read_only(
    image: str, request: pytest.FixtureRequest
) -> None:
    program = (
        "import evergrad_coordinator, pathlib, sys; p = "
        "pathlib.Path(evergrad_coordinator.__cached__); assert p.is_file(), p;"
        "flags = int.from_bytes(p.read_bytes()[4:8], 'little'); assert flags == 1, flags; assert "
        "sys.flags.safe_path"
    )
    output_of(request.getfixturevalue(image), "-c", program, entrypoint="python")
    look = "find /opt/evergrad ! -type l -perm /022 | head"
    assert output_of(request.getfixturevalue(image), "-c", look, entrypoint="sh") == ""


@pytest.mark.parametrize(
    ("image", "entrypoint"),
    [
        ("operator_image", ["python", "-m", "evergrad_operator"]),
        ("trainer_image", ["evergrad"]),
    ],
)
def test_an_image_has_its_user_entrypoint_and_labels(
    image: str, entrypoint: list[str], request: pytest.FixtureRequest
) -> None:
    settings = described(request.getfixturevalue(image))["Config"]
    assert settings["User"] == "10001:10001"
    assert settings["Entrypoint"] == entrypoint
    assert settings["StopSignal"] == "SIGTERM"
    labels = {
        key.rpartition(".")[2]: value
        for key, value in settings["Labels"].items()
        if key.startswith("org.opencontainers.image.")
    }
    assert {"title", "description", "version", "revision", "licenses"} <= set(labels)
    assert labels["version"] == product_images.version()


@pytest.mark.long
def test_another_commit_changes_only_the_labels_of_an_image_and_none_of_its_layers(
    operator_image: str,
) -> None:
    before = described(operator_image)
    first = before["Config"]["Labels"][product_images.REVISION_LABEL]
    product_images.ensure(("operator",), is_loaded=False, revision="0123abc")
    stamped = described(operator_image)
    assert stamped["Config"]["Labels"][product_images.REVISION_LABEL] == "0123abc"
    assert "EVERGRAD_REVISION=0123abc" in stamped["Config"]["Env"]
    assert stamped["RootFS"]["Layers"] == before["RootFS"]["Layers"]
    # Tests use the existing image of any commit; later tests find the image unchanged.
    product_images.ensure(("operator",), is_loaded=False)
    assert described(operator_image)["Id"] == stamped["Id"]
    product_images.ensure(("operator",), is_loaded=False, revision=first)
    assert described(operator_image)["Config"] == before["Config"]


def test_a_second_build_of_the_same_sources_does_nothing(
    built: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    del built
    product_images.ensure(is_loaded=False)
    said = capsys.readouterr().out
    assert said.count("there already") == 2

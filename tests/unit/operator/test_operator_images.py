"""Images of a run: all pods use the digest of the first pod, images loaded by hand work, and two images never
train together."""

import copy
from typing import Any

import pytest
from simulated_run import CONFIG, Simulation, make_run

from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.images import is_same_image, pin_image

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
TAG = "registry.example/trainer:1"
BY_DIGEST = f"registry.example/trainer@{A}"


@pytest.mark.parametrize(
    ("image", "image_id", "pinned"),
    [
        (
            "registry.example/team/trainer:1",
            f"registry.example/team/trainer@{A}",
            f"registry.example/team/trainer@{A}",
        ),
        (
            "registry.example:5000/trainer",
            f"registry.example:5000/trainer@{A}",
            f"registry.example:5000/trainer@{A}",
        ),
        (
            "registry.example:5000/trainer:1",
            f"docker-pullable://registry.example:5000/trainer@{A}",
            f"registry.example:5000/trainer@{A}",
        ),
        ("trainer:1", f"docker.io/library/trainer@{A}", f"trainer@{A}"),
        ("team/trainer:1", f"docker.io/team/trainer@{A}", f"team/trainer@{A}"),
        ("docker.io/trainer:1", f"docker.io/library/trainer@{A}", f"docker.io/trainer@{A}"),
        # The following images are in no registry by this digest, or this cannot be determined.
        ("registry.example/trainer:1", A, ""),
        ("registry.example/trainer:1", f"docker://{A}", ""),
        ("registry.example/trainer:1", f"docker.io/library/import-2026-11-22@{A}", ""),
        ("registry.example/trainer:1", f"mirror.example/trainer@{A}", ""),
        ("localhost/trainer:1", f"localhost/trainer@{A}", ""),
        ("registry.example/trainer:1", "", ""),
        ("registry.example/trainer:1", "registry.example/trainer@sha256:short", ""),
        (f"registry.example/trainer@{B}", f"registry.example/trainer@{A}", ""),
    ],
)
def test_a_digest_is_requested_if_a_registry_has_it(
    image: str, image_id: str, pinned: str
) -> None:
    assert pin_image(image, image_id) == pinned


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (A, A, True),
        (A, B, False),
        (f"docker://{A}", A, True),
        (f"r.example/x@{A}", f"docker-pullable://r.example/x@{A}", True),
        (f"r.example/x@{A}", f"r.example/x@{B}", False),
        # Manual imports: the date does not count, the digest does.
        (
            f"docker.io/library/import-2026-11-22@{A}",
            f"docker.io/library/import-2026-11-23@{A}",
            True,
        ),
        (
            f"docker.io/library/import-2026-11-22@{A}",
            f"docker.io/library/import-2026-11-23@{B}",
            False,
        ),
        # A configuration's digest, an index's and a manifest's cannot be compared.
        (f"r.example/x@{A}", B, True),
        (f"r.example/x@{A}", f"docker.io/library/import-2026-11-22@{B}", True),
        (f"r.example/x@{A}", f"mirror.example/x@{B}", True),
        (A, "", True),
        ("nonsense", A, True),
    ],
)
def test_image_ids_are_compared_if_they_are_comparable(
    one: str, other: str, is_same: bool
) -> None:
    assert is_same_image(one, other) is is_same
    assert is_same_image(other, one) is is_same


def begin(image_ids: list[str], *, config: Config = CONFIG, **spec: Any) -> Simulation:
    """A run of two nodes whose first pods run these images."""
    world = Simulation(make_run(nodes={"min": 2, "max": 2}, **spec), config=config)
    world.reconcile()
    world.start()
    for index, image_id in enumerate(image_ids):
        run_image(world, f"docs-lm-{index}-0", image_id)
    world.train()
    world.settle()
    return world


def run_image(world: Simulation, pod: str, image_id: str) -> None:
    (container,) = world.pods[pod]["status"]["containerStatuses"]
    container["imageID"] = image_id
    world.pods[pod]["spec"]["nodeName"] = f"host-{pod}"


def image_of(world: Simulation, pod: str) -> str:
    return str(world.pods[pod]["spec"]["containers"][0]["image"])


def replace_node(world: Simulation, pod: str) -> None:
    world.age(100)
    world.vanish(pod)
    world.settle()


def test_a_later_pod_runs_the_image_of_the_first_pod_although_the_tag_has_moved() -> None:
    world = begin([BY_DIGEST, BY_DIGEST])
    assert world.status["image"] == TAG
    assert world.status["memory"]["imageID"] == BY_DIGEST
    replace_node(world, "docs-lm-1-0")
    assert image_of(world, "docs-lm-1-1") == BY_DIGEST


def test_a_restart_resolves_the_tag_again() -> None:
    world = begin([BY_DIGEST, BY_DIGEST])
    world.set_spec(restartNonce="again")
    for _ in range(6):
        world.reconcile()
        world.leave()
    (pod,) = [name for name in world.live() if "-0-" in name]
    assert image_of(world, pod) == TAG
    assert "imageID" not in world.status["memory"]


def test_a_run_that_is_suspended_and_resumed_keeps_its_image() -> None:
    world = begin([BY_DIGEST, BY_DIGEST])
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.set_spec(suspend=False)
    world.reconcile()
    assert {image_of(world, pod) for pod in world.live()} == {BY_DIGEST}


@pytest.mark.parametrize("image_id", [A, f"docker.io/library/import-2026-11-22@{A}", ""])
def test_if_images_were_loaded_by_hand_all_pods_request_the_tag(image_id: str) -> None:
    world = begin([image_id, image_id])
    replace_node(world, "docs-lm-1-0")
    assert image_of(world, "docs-lm-1-1") == TAG
    assert world.status["restarts"]["byCause"] == {"Deleted": 1}


def test_if_images_are_never_pulled_all_pods_request_the_tag() -> None:
    world = begin([BY_DIGEST, BY_DIGEST], imagePullPolicy="Never")
    replace_node(world, "docs-lm-1-0")
    assert image_of(world, "docs-lm-1-1") == TAG


@pytest.mark.parametrize(
    "reason", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"]
)
def test_the_tag_is_requested_on_a_host_that_cannot_get_the_digest(reason: str) -> None:
    world = begin([BY_DIGEST, BY_DIGEST])
    replace_node(world, "docs-lm-1-0")
    world.wait_for("docs-lm-1-1", reason, "not found")
    world.settle()
    assert image_of(world, "docs-lm-1-2") == TAG
    # It is not tried again with the digest.
    world.start("docs-lm-1-2")
    run_image(world, "docs-lm-1-2", BY_DIGEST)
    world.settle()
    replace_node(world, "docs-lm-0-0")
    assert image_of(world, "docs-lm-0-1") == TAG
    assert world.status["failures"]["withoutProgress"] == 0


def test_a_pod_whose_tag_cannot_be_pulled_waits_as_before() -> None:
    world = begin([A, A])
    replace_node(world, "docs-lm-1-0")
    world.wait_for("docs-lm-1-1", "ErrImagePull", "not found")
    world.settle()
    assert "docs-lm-1-1" in world.live()


@pytest.mark.parametrize(
    ("first", "second"),
    [(BY_DIGEST, f"registry.example/trainer@{B}"), (A, B)],
    ids=["pulled", "brought by hand"],
)
def test_a_pod_with_another_image_ends_as_a_host_fault_and_the_first_pod_stays(
    first: str, second: str
) -> None:
    world = begin([first, second])
    assert world.live() == ["docs-lm-0-0", "docs-lm-1-1"]
    assert image_of(world, "docs-lm-1-1") == (BY_DIGEST if first == BY_DIGEST else TAG)
    assert world.status["restarts"]["byCause"] == {"HostFault": 1}
    assert world.status["failures"]["withoutProgress"] == 0
    assert second in world.status["lastFailure"]["message"]
    # The next pod avoids that host, if possible.
    affinity = world.pods["docs-lm-1-1"]["spec"]["affinity"]["nodeAffinity"]
    assert "host-docs-lm-1-0" in str(affinity)


@pytest.mark.parametrize(
    "image",
    [None, BY_DIGEST],
    ids=["by the first pod's digest", "by the digest of the run"],
)
def test_a_pod_that_requested_the_digest_stays_if_its_host_reports_another_image_id(
    image: str | None,
) -> None:
    """Hosts that have two manifests of one image may report either of them for a container."""
    world = begin([BY_DIGEST, BY_DIGEST], **({} if image is None else {"image": image}))
    replace_node(world, "docs-lm-1-0")
    world.start("docs-lm-1-1")
    run_image(world, "docs-lm-1-1", f"registry.example/trainer@{B}")
    world.settle()
    assert world.live() == ["docs-lm-0-0", "docs-lm-1-1"]
    assert world.status["restarts"]["byCause"] == {"Deleted": 1}


def test_a_host_that_keeps_another_image_is_tried_again_after_growing_pauses() -> None:
    world = begin([A, B])
    attempts = []
    for _ in range(40):
        for pod in world.live():
            if world.pods[pod]["status"]["phase"] == "Pending":
                world.start(pod)
                run_image(world, pod, B if "-1-" in pod else A)
        world.settle()
        world.leave()
        world.age(5)
        attempts.append(max(world.created))
    assert 3 <= len({name for name in world.created if name.startswith("docs-lm-1-")}) <= 12
    assert world.live()[0] == "docs-lm-0-0"


def test_an_operator_that_exits_before_it_records_the_image_resolves_the_same_image() -> (
    None
):
    world = Simulation(make_run(nodes={"min": 2, "max": 2}))
    world.reconcile()
    world.start()
    for index in range(2):
        run_image(world, f"docs-lm-{index}-0", BY_DIGEST)
    lost = copy.deepcopy(world)
    lost.reconcile(is_status_lost=True)
    world.settle()
    lost.settle()
    assert (
        lost.status["memory"]["imageID"] == world.status["memory"]["imageID"] == BY_DIGEST
    )

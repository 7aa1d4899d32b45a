"""The provisioner of the classes `shared` and `single`: one directory per claim, the same in both nodes.

It runs as a process of the bed as long as the bed exists. Volumes have the type `local`, for which the
kubelet applies fsGroup. A small or annotated claim gets a file system of its own size, so that it can become
full.
"""

import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bed import boxes
from bed.api import Api, ApiError, Object
from bed.places import NODES, SINGLE_CLASS, STORAGE_CLASS, volumes
from bed.shell import BedError, run

PROVISIONER = "bed.local/dir"
LIMITED = "bed.local/limited"
_LIMITED_BELOW = 256 * 2**20
_UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "": 1,
}


def main() -> None:
    """Serve until killed."""
    api = Api(Path(sys.argv[1]))
    volumes().mkdir(parents=True, exist_ok=True)
    threading.Thread(
        target=_follow,
        args=(api, "/api/v1/persistentvolumes", delete_if_released),
        daemon=True,
    ).start()
    _follow(api, "/api/v1/persistentvolumeclaims", provision)


def _follow(api: Api, path: str, act: Any) -> None:
    for kind, found in api.watch(path):
        if kind == "DELETED":
            continue
        for attempt in range(5):
            try:
                act(api, found)
                break
            except (ApiError, OSError, BedError) as error:
                print(
                    f"{time.strftime('%T')} {found['metadata']['name']}: attempt {attempt}: {error}",
                    flush=True,
                )
                time.sleep(0.5)


def provision(api: Api, claim: Object) -> None:
    """Create the directory and the volume of a claim of our classes that has none yet."""
    spec, metadata = claim["spec"], claim["metadata"]
    storage_class = spec.get("storageClassName")
    if (
        storage_class not in (STORAGE_CLASS, SINGLE_CLASS)
        or spec.get("volumeName")
        or metadata.get("deletionTimestamp")
    ):
        return
    if storage_class == SINGLE_CLASS and spec["accessModes"] != ["ReadWriteOnce"]:
        print(
            f"{time.strftime('%T')} {metadata['namespace']}/{metadata['name']}: "
            f"{spec['accessModes']} refused",
            flush=True,
        )
        return
    name = f"pvc-{metadata['uid']}"
    path = volumes() / name
    size = spec["resources"]["requests"]["storage"]
    is_limited = (
        metadata.get("annotations", {}).get(LIMITED) == "true"
        or size_in_bytes(size) <= _LIMITED_BELOW
    )
    path.mkdir(exist_ok=True)
    if is_limited:
        if not _image(name).exists():
            _make_file_system(name, size_in_bytes(size))
        for box in (
            boxes.CONTROL,
            *(node.name for node in NODES if boxes.is_up(node.name)),
        ):
            mount(box, name)
    try:
        api.create("/api/v1/persistentvolumes", _volume(name, path, claim))
        print(
            f"{time.strftime('%T')} {metadata['namespace']}/{metadata['name']}: "
            f"{name}{' limited' if is_limited else ''}",
            flush=True,
        )
    except ApiError as error:
        if error.status != 409:  # a second event for the same claim
            raise


def delete_if_released(api: Api, volume: Object) -> None:
    """Delete the directory and the volume of a claim that no longer exists."""
    if volume["spec"].get("storageClassName") not in (STORAGE_CLASS, SINGLE_CLASS):
        return
    if volume["spec"]["persistentVolumeReclaimPolicy"] != "Delete":
        return
    name, is_going = volume["metadata"]["name"], "deletionTimestamp" in volume["metadata"]
    if (
        volume.get("status", {}).get("phase") not in ("Released", "Failed")
        or is_going
        or not name.startswith("pvc-")
    ):
        return
    if _image(name).exists():
        for box in (*(node.name for node in NODES), boxes.CONTROL):
            if boxes.is_up(box):
                boxes.inside(box, ["umount", "--lazy", volumes() / name], check=False)
        _image(name).unlink()
    shutil.rmtree(volumes() / name, ignore_errors=True)
    api.delete(f"/api/v1/persistentvolumes/{name}")
    print(f"{time.strftime('%T')} {name}: deleted", flush=True)


def mount(box: str, name: str) -> None:
    """Mount a limited volume in a box. Every box has its own mounts, but all of them must share one loop
    device."""
    if f" {volumes() / name} " in Path(f"/proc/{boxes.pid_of(box)}/mountinfo").read_text():
        return
    listed = run(
        ["losetup", "--noheadings", "--output", "NAME", "--associated", _image(name)]
    ).split()
    # The control plane's box is first and never stops. The device exists as long as any mount of it.
    source = [listed[0]] if listed else ["--options", "loop", str(_image(name))]
    boxes.inside(box, ["mount", "--types", "ext4", *source, volumes() / name])
    if not listed:
        boxes.inside(box, ["rmdir", volumes() / name / "lost+found"])


def mount_all(box: str) -> None:
    """Mount every limited volume in a box that has just restarted."""
    for file in sorted(volumes().glob("*.ext4")):
        mount(box, file.stem)


def size_in_bytes(quantity: str) -> int:
    """Return the bytes of a Kubernetes storage quantity; for example, 64Mi returns 67108864."""
    number = quantity.rstrip("KMGTik")
    return int(float(number) * _UNITS[quantity[len(number) :]])


def _image(name: str) -> Path:
    return volumes() / f"{name}.ext4"


def _make_file_system(name: str, size: int) -> None:
    with open(_image(name), "wb") as file:
        file.truncate(size)
    run(["mkfs.ext4", "-q", "-m0", _image(name)])


def _volume(name: str, path: Path, claim: Object) -> Object:
    metadata, spec = claim["metadata"], claim["spec"]
    reference = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "name": metadata["name"],
        "namespace": metadata["namespace"],
    }
    terms = [
        {
            "key": "kubernetes.io/hostname",
            "operator": "In",
            "values": [node.name for node in NODES],
        }
    ]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": name,
            "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
        },
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": spec["storageClassName"],
            "local": {"path": str(path)},
            "claimRef": {**reference, "uid": metadata["uid"]},
            "nodeAffinity": {
                "required": {"nodeSelectorTerms": [{"matchExpressions": terms}]}
            },
        },
    }

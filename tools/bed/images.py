"""Builds container images and loads them into nodes without a registry, including the base and pause images.

An image is exported from the bed's storage as an OCI layout. All layouts share uncompressed blobs, so a
layer has the same digest everywhere, and a node receives only its missing layers. Loaded images are also
copied to a "golden" containerd folder, which later beds clone.
"""

import fcntl
import json
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bed import toolbox
from bed.places import cache
from bed.shell import BedError, run

BASE = "localhost/evergrad-base:bookworm"
PAUSE = "localhost/pause:local"
_SUITE = "bookworm"
_BASE_RECIPE = "2"  # increment it when make_base changes, to rebuild the cached image
_RUN = Path("/run/evergrad-images")
# Files that Python in a container does not need: documentation, translations, caches, package lists.
_NOT_NEEDED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/cache",
    "var/lib/apt/lists",
    "var/log",
)
_LIMITS = '["nofile=20000:20000", "nproc=20000:20000"]'  # what a machine without CAP_SYS_RESOURCE grants


def folder() -> Path:
    """Return the folder for images in the cache."""
    return cache() / "images"


def environment() -> dict[str, str]:
    """Return the environment in which buildah, podman and skopeo use the bed's storage."""
    home = folder()
    (home / "conf").mkdir(parents=True, exist_ok=True)
    storage = (
        f'[storage]\ndriver = "overlay"\ngraphroot = "{home}/storage"\nrunroot = "{_RUN}"\n'
    )
    engine = (
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
    )
    _write_if_other(home / "conf" / "storage.conf", storage)
    _write_if_other(
        home / "conf" / "containers.conf",
        f"[containers]\ndefault_ulimits = {_LIMITS}\n{engine}",
    )
    return {
        "CONTAINERS_STORAGE_CONF": str(home / "conf" / "storage.conf"),
        "CONTAINERS_CONF": str(home / "conf" / "containers.conf"),
    }


def identity(image: str) -> str | None:
    """Return the image's ID in the storage, or None if the storage does not have it."""
    command = ["podman", "image", "inspect", "--format", "{{.Id}}", image]
    return run(command, environment=environment(), check=False).strip() or None


def label(image: str, name: str) -> str | None:
    """Return the value of an image's label, or None if the label or the image does not exist."""
    form = f'{{{{index .Labels "{name}"}}}}'
    command = ["podman", "image", "inspect", "--format", form, image]
    return run(command, environment=environment(), check=False).strip() or None


def ensure_base() -> str:
    """Return the name of the base image (Debian with Python and the public certificates).

    If the image is missing, it is built with debootstrap.
    """
    if label(BASE, "evergrad.recipe") != _BASE_RECIPE:
        with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
            make_base(Path(scratch, "root"))
    return BASE


def make_base(root: Path) -> None:
    """Fill `root` from apt's mirror, remove unneeded files, and import it as an image."""
    root.mkdir()
    root.chmod(0o755)
    packages = "--include=python3,python3-venv,ca-certificates"
    # Use separate namespaces: debootstrap mounts /proc, and the mount must not remain if it is killed.
    alone = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    command: list[object] = [
        *alone,
        "debootstrap",
        "--variant=minbase",
        packages,
        _SUITE,
        root,
        mirror(),
    ]
    run(command, environment={"DEBIAN_FRONTEND": "noninteractive"})
    for name in _NOT_NEEDED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    shutil.rmtree(root / "dev")
    (root / "dev").mkdir()
    # Keep apt's sources: if torch is the CUDA build, its image installs a compiler from them.
    for name in ("etc/resolv.conf", "etc/hostname"):
        (root / name).unlink(missing_ok=True)
    archive = root.with_suffix(".tar")
    run(["tar", "--numeric-owner", "-C", root, "-cf", archive, "."])
    settings = ["CMD /usr/bin/python3", f"LABEL evergrad.recipe={_BASE_RECIPE}"]
    changes = [word for setting in settings for word in ("--change", setting)]
    run(["podman", "import", *changes, archive, BASE], environment=environment())


def mirror() -> str:
    """Return the mirror from which apt gets the suite. Raises BedError if apt's sources do not contain it."""
    listed = run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(REPO_URI) $(CODENAME) $(COMPONENT)",
            "Created-By: Packages",
        ]
    )
    for line in listed.splitlines():
        address, suite, component = line.split()
        if (suite, component) == (_SUITE, "main"):
            return address
    raise BedError(
        f"apt's sources name no mirror of Debian {_SUITE} (main). Add one; the base image is made from it."
    )


def ensure_pause() -> str:
    """Return the name of the pause image, which holds the pods' namespaces."""
    if identity(PAUSE) is None:
        with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
            shutil.copy(toolbox.binary("pause"), Path(scratch, "pause"))
            archive = Path(scratch, "pause.tar")
            run(
                [
                    "tar",
                    "--numeric-owner",
                    "--owner=0",
                    "--group=0",
                    "-C",
                    scratch,
                    "-cf",
                    archive,
                    "pause",
                ]
            )
            changes = ["--change", "USER 65535:65535", "--change", 'ENTRYPOINT ["/pause"]']
            run(["podman", "import", *changes, archive, PAUSE], environment=environment())
    return PAUSE


def build(
    directory: Path,
    tag: str,
    *,
    file: Path | None = None,
    target: str | None = None,
    arguments: Mapping[str, str] | None = None,
    volumes: Sequence[str] = (),
) -> str:
    """Build a Dockerfile on the base image with buildah, and return `tag`.

    The build uses the same package index as this process. The index's certificates are mounted at /run/ca.crt
    during the build (the build arguments PIP_CERT and SSL_CERT_FILE point there) and are not in the image.
    """
    ensure_base()
    command: list[object] = [
        "buildah",
        "bud",
        "--pull-never",
        "--layers",
        "--network",
        "host",
        "--tag",
        tag,
    ]
    given = dict(arguments or {})
    certificates = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if certificates:
        command += ["--volume", f"{Path(certificates).resolve()}:/run/ca.crt:ro"]
        given = {"PIP_CERT": "/run/ca.crt", "SSL_CERT_FILE": "/run/ca.crt", **given}
    for name, value in given.items():
        command += ["--build-arg", f"{name}={value}"]
    for volume in volumes:
        command += ["--volume", volume]
    command += ["--file", file] if file else []
    command += ["--target", target] if target else []
    run([*command, directory], environment=environment(), timeout=1800)
    return tag


def archive(image: str) -> Path:
    """Export the image as an OCI layout, and return its folder. Only new layers are written.

    Raises BedError if the image does not exist.
    """
    current = identity(image)
    if current is None:
        raise BedError(
            f"{image}: no such image in {folder() / 'storage'}. Build it first, in the "
            "environment of bed.images."
        )
    with _lock():
        return _export(image, current)


def _export(image: str, current: str) -> Path:
    layout = layout_of(image)
    stamp = layout / "image-id"
    if not stamp.exists() or stamp.read_text() != current:
        shutil.rmtree(layout, ignore_errors=True)
        layout.mkdir(parents=True)
        options = [
            "--insecure-policy",
            "copy",
            "--quiet",
            "--dest-oci-accept-uncompressed-layers",
        ]
        options += ["--dest-shared-blob-dir", str(_blobs())]
        run(
            ["skopeo", *options, f"containers-storage:{image}", f"oci:{layout}:image"],
            environment=environment(),
        )
        (layout / "name").write_text(image)
        stamp.write_text(current)
        _prune()
    return layout


def _prune() -> None:
    """Delete the blobs that no layout references."""
    named: set[str] = set()
    for index in (folder() / "layouts").glob("*/index.json"):
        digest = digest_of(index.parent)
        manifest = json.loads(_blob(digest).read_text())
        named |= {
            digest,
            manifest["config"]["digest"],
            *(layer["digest"] for layer in manifest["layers"]),
        }
    for blob in (_blobs() / "sha256").iterdir():
        if f"sha256:{blob.name}" not in named:
            blob.unlink()


def digest_of(layout: Path) -> str:
    """Return the digest of the layout's manifest, which identifies the image."""
    digest: str = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    return digest


def pack(layout: Path, held: set[str], target: Path) -> None:
    """Write a tar for `ctr images import`, without the blobs whose digests are in `held`."""
    image = (layout / "name").read_text()
    entry = json.loads((layout / "index.json").read_text())["manifests"][0]
    entry["annotations"] = {
        "io.containerd.image.name": image,
        "org.opencontainers.image.ref.name": image.rpartition(":")[2],
    }
    index = {"schemaVersion": 2, "manifests": [entry]}
    manifest = json.loads(_blob(entry["digest"]).read_text())
    layers = [layer["digest"] for layer in manifest["layers"]]
    # Always include manifest and configuration: they are small, and the importer reads them from the tar.
    blobs = [
        entry["digest"],
        manifest["config"]["digest"],
        *(digest for digest in dict.fromkeys(layers) if digest not in held),
    ]
    with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
        Path(scratch, "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        Path(scratch, "index.json").write_text(json.dumps(index))
        Path(scratch, "blobs", "sha256").mkdir(parents=True)
        for digest in blobs:
            # Do not use hard links: if another process packed the same blob, its link count would change
            # while tar reads it.
            Path(scratch, "blobs", *digest.split(":")).symlink_to(_blob(digest))
        run(
            [
                "tar",
                "-C",
                scratch,
                "--dereference",
                "-cf",
                target,
                "oci-layout",
                "index.json",
                "blobs",
            ]
        )


def wanted() -> dict[str, str]:
    """Return the images that every bed starts with: name → digest of the manifest."""
    try:
        found: dict[str, str] = json.loads((folder() / "wanted.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def want(image: str) -> Path:
    """Add the image to all later beds, and return its layout."""
    layout = archive(image)
    with _lock():
        _write_if_other(
            folder() / "wanted.json",
            json.dumps({**wanted(), image: digest_of(layout)}, indent=1),
        )
    return layout


def layout_of(image: str) -> Path:
    """Return the path of the image's layout, even if it is not written yet."""
    return folder() / "layouts" / image.replace("/", "_").replace(":", "_")


@contextmanager
def _lock() -> Iterator[None]:
    """Lock the layouts, blobs and list of wanted images, so that one process at a time changes them."""
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _blobs() -> Path:
    blobs = folder() / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    return blobs


def _blob(digest: str) -> Path:
    return _blobs().joinpath(*digest.split(":"))


def _scratch() -> Path:
    scratch = folder() / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch


def _write_if_other(file: Path, text: str) -> None:
    if not file.exists() or file.read_text() != text:
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(file)

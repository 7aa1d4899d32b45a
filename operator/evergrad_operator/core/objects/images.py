"""Names of images, as requested and as reported by the kubelet. Decides to which digest a run is pinned, and
whether two pods run the same image. Pure.

A tag may be moved while a run trains. All pods of a run use the image of its first pod:

| the kubelet's image ID of the first pod | image of later pods | pods are compared by |
|---|---|---|
| ``repository@sha256:…`` of the requested repository, as after a pull | this digest | repository and digest |
| of another repository, such as ``import-2026@sha256:…`` of a manual import | the tag, as before | digest |
| only ``sha256:…``, as of a manual import | the tag, as before | digest |

A pod that requested a digest runs it, and is not compared.

A manually imported image exists on hosts by its tag and in no registry, so its digest could not be pulled.
"""

import re
from typing import Final

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME: Final = re.compile(r"^[a-z-]+://")
_IMPORT: Final = re.compile(r"(?:^|/)import-\d{4}-\d{2}-\d{2}$")
_DOCKER_HUB: Final = "docker.io"


def pin_image(image: str, image_id: str) -> str:
    """Return the reference by digest to the image of ``image_id``; empty if it cannot be pulled by digest."""
    repository, _, digest = _SCHEME.sub("", image_id).partition("@")
    if "@" in image or not _DIGEST.fullmatch(digest):
        return ""

    # Container runtimes write the repository in full, with its registry. The first part of a name is a
    # registry only if it looks like a host. Otherwise the image is on Docker Hub; a name without a slash is
    # an official image.
    head, slash, last = image.rpartition("/")
    name = f"{head}{slash}{last.partition(':')[0]}"
    first, slash, rest = name.partition("/")
    is_host = "." in first or ":" in first or first == "localhost"
    asked = name
    if not slash or not is_host:
        asked = f"{_DOCKER_HUB}/{name if slash else f'library/{name}'}"
    elif first in (_DOCKER_HUB, "index.docker.io"):
        asked = f"{_DOCKER_HUB}/{rest if '/' in rest else f'library/{rest}'}"
    # A name that is valid only on this machine is in no registry, whatever digest a runtime has computed.
    if repository != asked or asked.startswith("localhost/"):
        return ""
    return f"{name}@{digest}"


def is_same_image(one: str, other: str) -> bool:
    """Return whether two image IDs may refer to the same image. IDs of different kinds count as the same."""
    kind, digest = _parse_id(one)
    other_kind, other_digest = _parse_id(other)
    if not digest or not other_digest or kind != other_kind:
        return True
    return digest == other_digest


def _parse_id(image_id: str) -> tuple[str, str]:
    """Return the kind of an ID and its digest. The kind is the repository, or empty for a bare digest. The
    digest is empty if the ID has an unknown form."""
    repository, _, digest = _SCHEME.sub("", image_id).rpartition("@")
    kind = "import" if _IMPORT.search(repository) else repository
    return kind, digest if _DIGEST.fullmatch(digest) else ""

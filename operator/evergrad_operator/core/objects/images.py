"""Names of images, as asked for and as the kubelet reports them: the digest that a run keeps to, and whether
two pods run the same image. Pure.

A tag may be moved while a run trains. The image that its first pod runs is the one for all its pods:

| the kubelet's image ID of the first pod | later pods ask for | pods are compared by |
|---|---|---|
| ``repository@sha256:…`` of the repository asked for, as after a pull | that digest | repository and digest |
| of another repository, such as ``import-2026@sha256:…`` of an import by hand | the tag, as before | digest |
| ``sha256:…`` alone, as of an import by hand | the tag, as before | digest |

A pod that asked for a digest runs it, and is compared with nothing.

An image that was imported by hand lies on hosts by its tag and is in no registry: a digest would not be
found.
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
    # registry only where it looks like a host; else it is on Docker Hub, a bare name as an official image.
    head, slash, last = image.rpartition("/")
    name = f"{head}{slash}{last.partition(':')[0]}"
    first, slash, rest = name.partition("/")
    is_host = "." in first or ":" in first or first == "localhost"
    asked = name
    if not slash or not is_host:
        asked = f"{_DOCKER_HUB}/{name if slash else f'library/{name}'}"
    elif first in (_DOCKER_HUB, "index.docker.io"):
        asked = f"{_DOCKER_HUB}/{rest if '/' in rest else f'library/{rest}'}"
    # A name of this machine alone is in no registry, whatever a runtime has computed for it.
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
    """Return the kind of an ID (its repository, none for a bare digest) and its digest, empty for an ID of no
    known shape."""
    repository, _, digest = _SCHEME.sub("", image_id).rpartition("@")
    kind = "import" if _IMPORT.search(repository) else repository
    return kind, digest if _DIGEST.fullmatch(digest) else ""

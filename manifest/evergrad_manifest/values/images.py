"""Checks names of container images, as a container runtime parses them."""

import re
from typing import Final

# The registry may contain upper-case letters and a port; the name may not.
_NAME: Final = r"[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?/)?{_NAME}(/{_NAME})*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-f]{32,})?"
)
IMAGE_RULE: Final = "it is [registry/]name[:tag][@digest], the name in lower case"
IMAGE_REMEDY: Final = "Write a reference such as registry.example.org/team/trainer:1.2"


def is_image(text: str) -> bool:
    """Return whether a container runtime could pull the image."""
    return _IMAGE.fullmatch(text) is not None

"""What the fields must satisfy together, in CEL: the same rules as the loader's, in its words, for the API server."""

from collections.abc import Mapping
from typing import Final

from evergrad_trainer.config.crd.nodes import Schema

RULES: Final[Mapping[str, tuple[Schema, ...]]] = {}

"""Imports transformers without reading the sources of all of its models twice."""

import importlib
import sys
from pathlib import Path
from typing import Any

_LISTING = "create_import_structure_from_path"


def import_transformers() -> None:
    """Import transformers, and let the package of its models take the list that this has made.

    transformers finds out what its model files hold by reading each of them: once for itself, and again, by
    another spelling of the same path, for ``transformers.models``. Nothing changes where models have been
    imported already, or where a version of transformers has no such list.
    """
    if "transformers.models" in sys.modules:
        return
    importlib.import_module("transformers")
    tools: Any = importlib.import_module("transformers.utils.import_utils")
    listing = getattr(tools, _LISTING, None)
    if listing is None:
        return

    def listing_of_folder(path: str | Path) -> Any:
        # The first list was made for the folder as a path, and is kept under that name.
        folder = Path(path)
        return listing(folder.parent if folder.is_file() else folder)

    setattr(tools, _LISTING, listing_of_folder)

"""Publishes a complete file under a name that only the first of several processes can use."""

import os
from pathlib import Path


def publish_once(temporary: Path, path: Path) -> None:
    """Rename a complete file to ``path``, unless ``path`` exists: then ``path`` stays as it is. Raises
    OSError.

    ``temporary`` may still exist afterwards; the caller removes it.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:
        # The volume has no hard links. Another process may create the name between the check and the rename.
        if not path.exists():
            os.rename(temporary, path)

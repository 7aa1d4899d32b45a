"""Names of whole files, which the first of several processes gives."""

import os
from pathlib import Path


def publish_once(temporary: Path, path: Path) -> None:
    """Give a whole file its name, unless that is taken: then ``path`` stays as it is. Raises OSError.

    ``temporary`` may be there afterwards, for the caller to remove.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:
        # A volume without hard links. Between the look and the rename another process may give the name.
        if not path.exists():
            os.rename(temporary, path)

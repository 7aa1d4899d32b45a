"""``python -m evergrad_cli``: the command ``evergrad``."""

import sys

from evergrad_cli.main import main

if __name__ == "__main__":
    sys.exit(main())

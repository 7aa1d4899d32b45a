"""``evergrad`` and ``python -m evergrad_trainer``."""

import sys

from evergrad_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

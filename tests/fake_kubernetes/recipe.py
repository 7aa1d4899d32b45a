"""A recipe that ``evergrad validate`` accepts, with room for more nodes than any test uses."""

from pathlib import Path
from typing import Any

import yaml

_BASE = Path(__file__).parent.parent / "unit" / "manifest" / "base_manifest.yaml"

TRAINING: dict[str, Any] = {
    **yaml.safe_load(_BASE.read_text())["spec"]["training"],
    "batching": {"globalBatchSize": 4096, "microBatchSize": 1},
    "horizon": {"steps": 100},
}

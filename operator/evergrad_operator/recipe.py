"""The hash by which runs on one volume recognise each other's recipe. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from evergrad_coordinator.contract import OPERATIONAL_SECTIONS
from evergrad_manifest.script import Script


def hash_recipe(training: Mapping[str, Any] | None, script: Script | None) -> str:
    """SHA-256 of the recipe or script as the run says it, 64 hex digits: equal for what may share a run
    directory.

    It stands in the records of runs on their volumes, so that it must not change between versions.
    """
    if training is not None:
        return hash_json(
            {
                key: value
                for key, value in training.items()
                if value is not None and key not in OPERATIONAL_SECTIONS
            }
        )
    if script is None:
        return ""
    return hash_json(
        {
            "command": script.command,
            "env": script.env,
            "workingDirectory": script.working_directory,
        }
    )


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=dict
    )
    return hashlib.sha256(text.encode()).hexdigest()

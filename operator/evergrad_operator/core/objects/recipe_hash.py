"""Hashes JSON values, and the recipe as written in a run, which records of older versions contain. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from evergrad_common.contract import OPERATIONAL_SECTIONS
from evergrad_manifest.envelope.script import Script


def hash_spelling(training: Mapping[str, Any] | None, script: Script | None) -> str:
    """Return the SHA-256 of the recipe or script as the run writes it, as 64 hex digits.

    Older versions wrote this hash into the records of runs on their volumes, so it must never change.
    """
    # Operational sections do not change what is trained, and were never a part of the hash.
    if training is not None:
        kept = {
            key: value
            for key, value in training.items()
            if value is not None and key not in OPERATIONAL_SECTIONS
        }
        return hash_json(kept)
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
    """Return the SHA-256 of a JSON value, as 64 hex digits. It does not depend on the order of keys."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=dict
    )
    return hashlib.sha256(text.encode()).hexdigest()

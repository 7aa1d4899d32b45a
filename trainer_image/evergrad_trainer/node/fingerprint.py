"""Values that must be equal on all nodes of a group, as texts by name: versions, configuration, device, and
the user's own files."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.envelope.script import Script, program_path, working_directory_of
from evergrad_manifest.files.sources import existing, files_of_module, hash_sources
from evergrad_manifest.files.task_files import hash_task
from evergrad_manifest.identity import config_hash, settings_hash
from evergrad_trainer import __version__
from evergrad_trainer.distributed.process_groups import count_accelerators

if TYPE_CHECKING:
    from evergrad_trainer.worker.session import SessionPlan

TASK = "task"
"""Name of the hash of the user's own task."""
IMAGE_DIGEST_VARIABLE = "EVERGRAD_IMAGE_DIGEST"
"""Environment variable of a node: the digest of its image, if known."""
_CODE = (".py", ".sh", ".yaml", ".yml", ".toml")
"""Suffixes of arguments that are hashed as part of a script. Files that a script writes have other
suffixes."""


def fingerprint(run: TrainingRun, base_directory: Path) -> dict[str, str]:
    """Return the values of this node. ``base_directory``: base of relative paths in the manifest."""
    wants_cpu = run.spec.training is not None and run.spec.training.runtime.device == "cpu"
    found = {
        "torch": str(torch.__version__),
        "evergrad": __version__,
        "configuration": config_hash(run),
        # A node whose accelerator failed must not join a group of accelerators and slow it down with its CPU.
        "device": "cpu" if wants_cpu or not count_accelerators() else "cuda",
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    if digest := os.environ.get(IMAGE_DIGEST_VARIABLE):
        found["image"] = digest
    if run.spec.training is not None:
        found["settings"] = settings_hash(run)
        if task := hash_task(run.spec.training, base_directory):
            found[TASK] = task
    if run.spec.script is not None:
        found["script"] = hash_script(run.spec.script, base_directory)
    return found


def fingerprint_of_plan(plan: "SessionPlan") -> dict[str, str]:
    """Return the values that are known after a typed run is planned: data, evaluation sets, steps, and task
    files.

    If nodes had different folders, each would train on its share of a different data set and end at a
    different step, and evaluations would be means over parts of several sets.
    """
    found = {"steps": str(plan.numbers.total_steps)}
    # Hash the content, whatever its path: checkpoints are compared by this hash.
    if plan.opened is not None:
        found["data"] = plan.opened.data.fingerprint
        sets = [[one.name, one.fingerprint] for one in plan.opened.data.evaluation]
        found["evaluation"] = hashlib.sha256(json.dumps(sets).encode()).hexdigest()[:16]
    # Use the hash from when the files were opened: preparing data may have taken hours since the first read.
    if plan.task_hash:
        found[TASK] = plan.task_hash
    return found


def hash_script(script: Script, base_directory: Path) -> str:
    """Return a hash of the files that the command names, and of the modules next to them that they import
    directly or indirectly."""
    program, working = script.program, working_directory_of(script, base_directory)
    path = program_path(script.program, base_directory)
    roots = [working / word for word in program.arguments if word.endswith(_CODE)]
    # Search modules as Python does: next to the file, or else in the working directory.
    if path is not None:
        return hash_sources([path, *existing(roots)], path.parent)
    if program.kind == "module":
        roots += files_of_module(working, [*program.name.split("."), "__main__"])
    return hash_sources(list(existing(roots)), working)

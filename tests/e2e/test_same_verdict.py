"""``evergrad validate`` and ``kubectl apply`` give the same verdict on a file, and read the same values from
it."""

import io
import json
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import Runs, make_manifest, wait_for
from patience import PATIENCE
from verdicts import ACCEPTED, REFUSED, STRICTER, Changes, with_defaults, write_manifest

from evergrad_cli.main import main
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.structure.check import without_stored_nulls
from evergrad_manifest.structure.sections import build_spec
from evergrad_manifest.values.numbers import with_whole_numbers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
AT_ONCE = 4
"""Number of concurrent kubectl calls: each mostly waits."""


def write(folder: Path, table: Mapping[str, Changes]) -> dict[str, Path]:
    """Return the file of each row by name."""
    base = make_manifest("same", steps=20, changes={"template": None})
    files = {}
    for number, (name, changes) in enumerate(table.items()):
        files[name] = folder / f"{number:02}.yaml"
        files[name].write_text(write_manifest(base, changes))
    return files


def validate(file: Path) -> tuple[int, str]:
    """Return the exit code and the output of ``evergrad validate``, run in this process, because a new one
    takes seconds."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = main(["validate", str(file)])
    return code, output.getvalue()


def apply_dry(runs: Runs, file: Path) -> subprocess.CompletedProcess[str]:
    """Ask the server which object it would store for a file, with unknown fields as errors."""
    place = ["--kubeconfig", str(runs.cluster.kubeconfig), "--namespace", runs.namespace]
    words = [
        "apply",
        "--dry-run=server",
        "--validate=strict",
        "-o",
        "json",
        "-f",
        str(file),
    ]
    return subprocess.run(
        [str(runs.cluster.kubectl), *place, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def apply_all(
    runs: Runs, files: Mapping[str, Path]
) -> dict[str, subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = pool.map(lambda file: apply_dry(runs, file), files.values())
        return dict(zip(files, done, strict=True))


def wait_for_webhook(runs: Runs, folder: Path) -> None:
    """Wait until the operator validates stored objects: an API server alone accepts a misspelled key."""
    wrong = write(folder, {"first": {"spec.training.optimizer.learningrate": "1"}})["first"]
    wait_for(lambda: apply_dry(runs, wrong).returncode != 0, "the webhook's first answer")


def read_here(file: Path) -> dict[str, Any]:
    """Return the values that ``evergrad`` reads from a file, in the form in which a server stores them."""
    raw = with_whole_numbers(load_manifest(file).raw)
    schema = build_spec()
    spec = with_defaults(schema, without_stored_nulls(schema, raw["spec"]))
    return comparable(raw["metadata"], spec)


def read_there(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a server would store."""
    return comparable(stored["metadata"], stored["spec"])


def comparable(metadata: Mapping[str, Any], spec: Any) -> dict[str, Any]:
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key != LAST_APPLIED
    }
    return {
        "name": metadata["name"],
        "labels": metadata.get("labels") or {},
        "annotations": annotations,
        "spec": spec,
    }


def test_validate_and_apply_give_the_same_verdict_and_parse_one_file_alike(
    runs: Runs, tmp_path: Path
) -> None:
    wait_for_webhook(runs, tmp_path)
    tables = {"accepted": ACCEPTED, "refused": REFUSED, "stricter": STRICTER}
    # For kubectl as for validate: the exit codes of validate, and whether kubectl exits with 0.
    expected = {"accepted": (0, True), "refused": (64, False), "stricter": (64, True)}
    apart: list[str] = []
    for kind, table in tables.items():
        (folder := tmp_path / kind).mkdir()
        files = write(folder, table)
        applied = apply_all(runs, files)
        for name, file in files.items():
            (code, said), done = validate(file), applied[name]
            if (code, done.returncode == 0) != expected[kind]:
                apart.append(
                    f"{kind}: {name}: validate {code}, kubectl {done.returncode}\n"
                    f"  {said.strip()[:600]}\n  {done.stderr.strip()[:600]}"
                )
            elif kind == "accepted":
                here, there = read_here(file), read_there(json.loads(done.stdout))
                # As JSON: for Python 1, 1.0 and true are equal.
                texts = [json.dumps(one, sort_keys=True) for one in (here, there)]
                if texts[0] != texts[1]:
                    apart.append(
                        f"{kind}: {name}: read here\n  {texts[0]}\n  there\n  {texts[1]}"
                    )
    assert apart == [], "\n" + "\n".join(apart)
    assert runs.list("trainingruns") == []

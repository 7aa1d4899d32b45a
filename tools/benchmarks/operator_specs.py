"""The cost of the manifest's models in the operator: processor time and memory per run with 1,000 runs, and
the time of a pass over each.

    python tools/benchmarks/operator_specs.py [--runs 1000]

No cluster is needed. `cluster_scale.py` measures the whole operator with an API server.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).resolve().parents[2] / "tests/unit/manifest/base_manifest.yaml"


def resident_mebibytes() -> float:
    """Return the memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def make_runs(number: int) -> list[dict[str, Any]]:
    """Return runs in the form of the API server, each with its own text objects."""
    file = json.dumps(yaml.safe_load(MANIFEST.read_text()))
    runs = [json.loads(file) for _ in range(number)]
    for index, run in enumerate(runs):
        run["metadata"] = {
            "name": f"run-{index}",
            "namespace": "team",
            "uid": f"uid-{index}",
            "generation": 1,
        }
    return runs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    number: int = parser.parse_args().runs

    # Measure the memory before the manifest's package is imported: interpreter, client and framework.
    import evergrad_operator.edge.service  # noqa: F401 - its imports are measured with the rest
    from evergrad_operator.core.observe.spec import SpecCache

    runs = make_runs(number)
    cache = SpecCache()
    gc.collect()
    before = resident_mebibytes()

    # The first pass parses and validates each run, like the start of the operator.
    started = time.process_time()
    for run in runs:
        cache.parse(run)
    first = time.process_time() - started
    gc.collect()
    kept = resident_mebibytes() - before

    # A later pass over the same generation uses the stored result.
    started = time.process_time()
    for run in runs:
        cache.parse(run)
    later = time.process_time() - started

    from evergrad_operator.edge.webhook import certificates

    bundle = certificates.renew(
        None,
        ("a.b.svc",),
        now=certificates.utc_now(),
    )
    with_webhook = resident_mebibytes() - before - kept
    if bundle is None:
        raise SystemExit("no certificate was made")
    print(f"{number} runs, resident before them: {before:.1f} MiB")
    print(
        f"first pass, parsed and validated: {1000 * first / number:.3f} ms of processor time a run"
    )
    print(f"later passes, from the cache: {1000 * later / number:.4f} ms a run")
    print(f"kept: {kept:.1f} MiB, {1024 * kept / number:.1f} KiB a run")
    print(f"cryptography, where a webhook is served: {with_webhook:.1f} MiB")


if __name__ == "__main__":
    main()

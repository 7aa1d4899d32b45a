"""The check of ``evergrad doctor`` for the claims that runs name. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.diagnosis.checks import Check, CheckState
from evergrad_cli.cluster.render.runs import parse_run
from evergrad_manifest.model.claims import claims_of


def check_claims(
    runs: Sequence[Mapping[str, Any]] | None, claims: Sequence[Mapping[str, Any]] | None
) -> Check:
    """Check for claims that runs of the namespace name and that no pod can mount."""
    if runs is None or claims is None:
        return Check("claims", CheckState.SKIP, "this user may not list claims and runs")
    there = {str(part(raw, "metadata").get("name", "")): raw for raw in claims}
    faults = []
    for raw in sorted(runs, key=lambda raw: str(part(raw, "metadata").get("name", ""))):
        run, named = parse_run(raw), claims_of(raw)
        if run.is_over or run.is_deleting:
            continue
        for name in sorted(named.all):
            claim = there.get(name)
            # The operator creates a claim with the name of the run.
            if claim is None and name != run.name:
                faults.append(f"claim {name} of run {run.name} does not exist")
            elif part(claim, "status").get("phase") == "Lost":
                faults.append(f"claim {name} of run {run.name} has lost its volume")
            elif part(claim, "metadata").get("deletionTimestamp"):
                faults.append(f"claim {name} of run {run.name} is being deleted")
    if faults:
        remedy = "Create or restore these claims, or name others in new runs"
        return Check("claims", CheckState.WARN, "; ".join(faults), remedy)
    return Check("claims", CheckState.OK, "every claim that a run names can be mounted")

"""Rules that one installation has for its runs, beside those that hold everywhere. Pure.

``evergrad validate`` does not know them. The webhook and the check before a run's first pod do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_manifest.envelope.storage import FOR_ONE_POD, check_shared
from evergrad_manifest.envelope.volumes import ACCOUNT
from evergrad_manifest.errors import Problem
from evergrad_manifest.values.numbers import show
from evergrad_operator.raw import get_int, get_map

_SETTING: Final = "runs.allowed.serviceAccountNames of the chart"
DELETES_RUN: Final = "Run"
"""Value of ``spec.ttlDeletes`` by which a run asks for its own deletion."""


@dataclass(frozen=True)
class Installation:
    """Limits and defaults that an installation sets for runs. The default allows nothing."""

    service_accounts: tuple[str, ...] = ()
    """Names of the accounts that runs may have."""
    access_mode: str = ""
    """Access mode of new volumes whose run names none."""
    deletes_runs: bool = False
    """Whether the operator deletes runs that ask for it a while after their end."""


NOTHING_ALLOWED: Final = Installation()
NO_DELETION: Final = Problem(
    "spec.ttlDeletes",
    "Run is not allowed in this installation",
    "its operator has no right to delete TrainingRuns",
    "Write Children, or have runs.allowed.deletion of the chart set",
)
"""A run that asks for its own deletion where that is not allowed."""


def find_refusals(
    document: Mapping[str, Any], installation: Installation
) -> tuple[Problem, ...]:
    """Find what this installation does not allow in ``document``, an object as the API server sends it.

    Values that the manifest's own rules refuse are passed over.
    """
    found = []
    spec = get_map(document, "spec")
    account = get_map(spec, "template").get("serviceAccountName")
    allowed = installation.service_accounts
    if isinstance(account, str) and account and account not in allowed:
        why = f"it allows {', '.join(allowed)}" if allowed else "it allows none"
        remedy = (
            f"Use one of these, or have {account} added to {_SETTING}"
            if allowed
            else f"Remove it, or have {account} added to {_SETTING}"
        )
        what = f"{show(account)} is not a service account that this installation allows"
        found.append(Problem(ACCOUNT, what, why, remedy))

    if spec.get("ttlDeletes") == DELETES_RUN and not installation.deletes_runs:
        found.append(NO_DELETION)

    # A default that the run does not see in its file, and that would leave all nodes but one without a place.
    storage, nodes = get_map(spec, "storage"), get_map(spec, "nodes")
    is_default = not storage.get("accessModes") and not storage.get("claimName")
    if is_default and installation.access_mode == FOR_ONE_POD:
        why = f"new volumes of this installation are {FOR_ONE_POD} unless the run says otherwise"
        found += check_shared(get_int(nodes, "min") or 1, get_int(nodes, "max"), why)
    return tuple(found)

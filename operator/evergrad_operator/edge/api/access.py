"""Checks at the start that the operator may do its work: missing rights would look like a hang later."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from evergrad_operator.core.objects.errors import ApiError, SettingsError
from evergrad_operator.core.objects.kinds import (
    CLAIM,
    CONFIG_MAP,
    POD,
    POD_GROUPS,
    RUN,
    SECRET,
    SERVICE,
    Kind,
)
from evergrad_operator.edge.api.kube import Kube

_NEEDED: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("list", RUN, ""),
    ("watch", RUN, ""),
    ("patch", RUN, "status"),
    *((verb, POD, "") for verb in ("list", "watch", "create", "delete")),
    *(
        (verb, kind, "")
        for kind in (CONFIG_MAP, SERVICE, CLAIM)
        for verb in ("list", "create", "patch")
    ),
    ("create", SECRET, ""),
)
"""Verb, kind and subresource without which no run can be served."""


async def check_access(
    kube: Kube,
    scopes: Sequence[str | None],
    *,
    gang: str = "none",
    deletes_runs: bool = False,
) -> None:
    """Fail for missing rights or a missing CRD in any of ``scopes``; None is the whole cluster.

    ``gang``: the installation's kind of gang, whose PodGroups the operator makes. ``deletes_runs``: whether
    it deletes runs.
    Raises SettingsError, and ApiError for what a later try may mend.
    """
    needed = _NEEDED + tuple(
        (verb, kind, "")
        for kind in POD_GROUPS.get(gang, ())[:1]
        for verb in ("list", "create", "patch")
    )
    if deletes_runs:
        needed = (*needed, ("delete", RUN, ""))
    for scope in scopes:
        asked = (
            kube.may(verb, kind, namespace=scope, subresource=sub)
            for verb, kind, sub in needed
        )
        answers = await asyncio.gather(*asked)
        lacking = [
            f"{verb} {kind.plural}{'/' if sub else ''}{sub}"
            for (verb, kind, sub), may in zip(needed, answers, strict=True)
            if not may
        ]
        if lacking:
            await _check_is_ready(kube)
            where = f"namespace {scope}" if scope else "the whole cluster"
            raise SettingsError(
                f"the operator may not {', '.join(lacking)} in {where}. Install the chart's "
                "roles for this scope."
            )
        # Rights may be granted for a kind that does not exist: only a list shows that it does.
        try:
            async with aclosing(kube.list_pages(RUN, scope, metadata_only=True)) as pages:
                # One page is enough.
                await anext(pages)
        except ApiError as error:
            if error.status != 404:
                raise
            await _check_is_ready(kube)
            raise SettingsError(
                "the API server does not know TrainingRuns. Install the chart's CRD first."
            ) from error


async def _check_is_ready(kube: Kube) -> None:
    """Raise ApiError if the API server is still starting: what it lacks or refuses then is no verdict."""
    if not await kube.is_ready():
        raise ApiError(503, "NotReady", "the API server is still starting")

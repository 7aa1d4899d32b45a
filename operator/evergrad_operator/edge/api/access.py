"""Checks at the start that the operator has its permissions. A missing one would look like a hang later."""

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
"""The required permissions: verb, kind and subresource."""


async def check_access(
    kube: Kube,
    scopes: Sequence[str | None],
    *,
    gang: str = "none",
    deletes_runs: bool = False,
) -> None:
    """Check the permissions and the CRD in each of ``scopes``; None stands for the whole cluster.

    ``gang``: the installation's kind of gang, whose PodGroups the operator creates. ``deletes_runs``: whether
    the operator deletes runs.

    Raises SettingsError if a permission or the CRD is missing, and ApiError if a later try may succeed.
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
        # A permission may be granted for a kind that does not exist, so list the runs to check the CRD.
        try:
            async with aclosing(kube.list_pages(RUN, scope, metadata_only=True)) as pages:
                # The first page is sufficient.
                await anext(pages)
        except ApiError as error:
            if error.status != 404:
                raise
            await _check_is_ready(kube)
            raise SettingsError(
                "the API server does not know TrainingRuns. Install the chart's CRD first."
            ) from error


async def _check_is_ready(kube: Kube) -> None:
    """Raise ApiError if the API server is still starting, because its refusals are not reliable then."""
    if not await kube.is_ready():
        raise ApiError(503, "NotReady", "the API server is still starting")

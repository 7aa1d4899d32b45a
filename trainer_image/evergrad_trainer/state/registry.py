"""The registry of a run's state. Each part of the state that a run needs to continue is registered once.

Save, restore, transfer to a new member, reset, export and comparison of replicas all read the registry, so
they all cover the same state. A provider has tensors, small JSON values, or both:

===============  =====================================  ====================================
name             tensors, as ``<name>.<its own name>``  values
===============  =====================================  ====================================
``model``        parameters and persistent buffers
``optimizer``    ``<parameter>.<slot>``                 its scalars, such as Adam's ``step``
``ema``          ``<module>.<parameter>``, averaged     number of updates in the average
``loss_scale``   the scale of fp16 and its count
``counters``                                            finished steps and other counts
``cursor``                                              next item of each source (compared)
``description``                                         the resolved model (compared)
``observers``                                           state of a task's observers
``frozen``                                              hashes of frozen modules (compared)
``snapshots``                                           hashes of the snapshots taken so far
``task``                                                hashes of the task's files (compared)
``recipe``                                              the recipe, field by field
===============  =====================================  ====================================

Compared values are not part of the state. When a checkpoint is loaded, they are compared with the current
values. Other trained modules of a task are registered under their own names, like ``model``. ``kept`` are
further tensors of a task. Observers register their own state.

Rules for providers:

- Names, shapes and types of tensors are fixed at registration and are the same on every rank.
- :meth:`Provider.tensors` returns the live tensors, which are loaded in place. They change only within a
  step. Between two steps they are read-only, so that they can be copied while training continues.
- Values describe the state after the last finished step. They are the same on every rank, unless the
  provider documents otherwise.
"""

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

MAX_VALUES_BYTES: Final = 256 * 1024
"""Largest size of one provider's values as JSON. The values are sent each time a group forms and are stored
in every manifest."""

COUNTERS: Final = "counters"
CURSOR: Final = "cursor"
DESCRIPTION: Final = "description"
OPTIMIZER: Final = "optimizer"
EMA: Final = "ema"
LOSS_SCALE: Final = "loss_scale"
MODEL: Final = "model"
KEPT: Final = "kept"
OBSERVERS: Final = "observers"
FROZEN: Final = "frozen"
SNAPSHOTS: Final = "snapshots"
TASK: Final = "task"
RECIPE: Final = "recipe"
RESERVED: Final = frozenset(
    {
        COUNTERS,
        CURSOR,
        DESCRIPTION,
        OPTIMIZER,
        KEPT,
        OBSERVERS,
        FROZEN,
        SNAPSHOTS,
        TASK,
        RECIPE,
    }
)
"""Names that no module of a task may have. ``ema`` and ``loss_scale`` are reserved only if the manifest
enables them, because tasks that were written before these names may already use them."""

Values = Mapping[str, Any]


class Provider(Protocol):
    """One named part of a run's state."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors by the provider's own names (may be empty)."""

    def values(self) -> Values:
        """Return the JSON values of the state after the last finished step (may be empty)."""

    def load_values(self, values: Values) -> None:
        """Load the values that :meth:`values` returned for the restored state, in this or another process.

        An empty mapping means that the state was saved before this provider existed. The tensors of the
        state may not be loaded yet.
        """

    def reset(self) -> None:
        """Reset to the state before the first step; tensors in place, with the same bits in every process."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, full shape and type of a registered tensor, whichever shard of it a rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Registry:
    """All providers of one process, in the order of registration."""

    def __init__(self) -> None:
        self._providers: dict[str, Provider] = {}

    def register(self, name: str, provider: Provider) -> None:
        """Add a provider.

        ``name`` is the first part of the names of its tensors. Raises ValueError if ``name`` is empty,
        contains a dot or is already registered.
        """
        # With a dot in a name, the tensors of two providers could have the same name.
        if not name or "." in name or name in self._providers:
            raise ValueError(
                f"the state registry cannot take {name!r}: names are unique and without dots"
            )
        self._providers[name] = provider

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every live tensor by the name ``<provider>.<name>``.

        A checkpoint contains these tensors, and a new member receives them.
        """
        return {
            f"{name}.{own}": tensor
            for name, provider in self._providers.items()
            for own, tensor in provider.tensors().items()
        }

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of all tensors, ordered by name, which are equal on every rank in every world."""
        # Ordered by name, because an older version may have registered the providers in another order.
        tensors = self.tensors()
        return tuple(
            TensorSpec(name, tuple(tensors[name].shape), tensors[name].dtype)
            for name in sorted(tensors)
        )

    def values(self) -> dict[str, Values]:
        """Return the values of each provider by its name; providers without values are omitted.

        Raises ValueError if the values of a provider exceed MAX_VALUES_BYTES.
        """
        # The limit is checked here and not on loading, so that a state that cannot be saved is not trained.
        values = {name: provider.values() for name, provider in self._providers.items()}
        for name, own in values.items():
            size = len(json.dumps(own, allow_nan=False))
            if size > MAX_VALUES_BYTES:
                raise ValueError(
                    f"state of {name!r}: {size:,} bytes of values; at most {MAX_VALUES_BYTES:,} are kept"
                )
        return {name: own for name, own in values.items() if own}

    def load_values(
        self, values: Mapping[str, Values], *, only: Container[str] | None = None
    ) -> None:
        """Pass each provider its values, in the order of registration. ``only``: load these names alone.

        Values of unknown providers are ignored.
        """
        # Providers without stored values receive an empty mapping: the state is older than the provider.
        for name, provider in self._providers.items():
            if only is None or name in only:
                provider.load_values(values.get(name, {}))

    def reset(self) -> None:
        """Reset every provider to the state before the first step."""
        for provider in self._providers.values():
            provider.reset()


@dataclass(frozen=True)
class Agreement:
    """Provides values that are not state. They are saved with the state and compared when it is loaded."""

    value: Callable[[], Values]
    """Returns the current values."""
    check: Callable[[Values], None] | None = None
    """Compares the saved values with the current values; logs or raises the differences. If this is None, the
    values are compared elsewhere, from the manifest of the checkpoint, before anything is loaded."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return an empty mapping, because an agreement has no tensors."""
        return {}

    def values(self) -> Values:
        """Return the current values."""
        return self.value()

    def load_values(self, values: Values) -> None:
        """Compare ``values`` with the current values. A state of an older version may have no values."""
        if values and self.check is not None:
            self.check(values)

    def reset(self) -> None:
        """Do nothing."""


def to_extra(values: Mapping[str, Values]) -> dict[str, Any]:
    """Convert ``values`` to the ``extra`` field of a checkpoint's manifest.

    The counters, ``cursor`` and ``model`` are top-level keys, in the format of the first versions. All other
    values are under ``state``.

    For example, ``{"step": 12, "cursor": {...}, "model": {...}, "state": {"optimizer": {...}}}``.
    """
    rest = {
        name: dict(own)
        for name, own in values.items()
        if name not in (COUNTERS, CURSOR, DESCRIPTION)
    }
    extra: dict[str, Any] = {**values.get(COUNTERS, {}), "state": rest}
    if CURSOR in values:
        extra["cursor"] = dict(values[CURSOR])
    if DESCRIPTION in values:
        extra["model"] = dict(values[DESCRIPTION])
    return extra


def from_extra(extra: Mapping[str, Any]) -> dict[str, Values]:
    """Convert the ``extra`` field of a manifest back to values.

    Also reads manifests of versions before :func:`to_extra`, which have Adam's step among the counters.
    """
    # All other top-level keys are counters, as in the manifests of the first versions.
    counters = {
        name: value
        for name, value in extra.items()
        if name not in ("cursor", "model", "state")
    }
    values: dict[str, Values] = {COUNTERS: counters, **extra.get("state", {})}
    if "cursor" in extra:
        values[CURSOR] = extra["cursor"]
    if "model" in extra:
        values[DESCRIPTION] = extra["model"]
    # In versions without a registry, the number of updates was also Adam's step.
    if "state" not in extra:
        values[OPTIMIZER] = {"step": float(extra.get("updates", extra["step"]))}
    return values


def recipe_in(extra: Mapping[str, Any]) -> Values:
    """Return the recipe of a checkpoint, field by field; empty if an older version wrote the checkpoint."""
    state = extra.get("state")
    recipe = state.get(RECIPE) if isinstance(state, Mapping) else None
    return recipe if isinstance(recipe, Mapping) else {}

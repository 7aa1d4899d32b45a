"""The registry of a run's state: whatever a run needs to continue is registered here once, under a name.

Saving, restoring, transferring to a newcomer, going back to the beginning, exporting and comparing replicas
all read the registry, so that what they cover cannot differ. A provider has tensors, small JSON values, or
both:

===============  =====================================  ====================================
name             tensors, as ``<name>.<its own name>``  values
===============  =====================================  ====================================
``model``        parameters and persistent buffers
``optimizer``    ``<parameter>.<slot>``                 its scalars, such as Adam's ``step``
``ema``          ``<module>.<parameter>``, averaged     how many updates are in it
``loss_scale``   the scale of fp16 and its count
``counters``                                            finished steps, and what was counted
``cursor``                                              next item of each source (compared)
``description``                                         the resolved model (compared)
``observers``                                           what a task's observers remember
``frozen``                                              hashes of frozen modules (compared)
``snapshots``                                           hashes of those that were taken
``task``                                                hashes of the task's files (compared)
``recipe``                                              the recipe, field by field
===============  =====================================  ====================================

Values that are compared are no state: loading a checkpoint compares them with what they are here and now.
Further trained modules of a task stand beside ``model`` under their own names; ``kept`` are the tensors that
a task keeps besides. Observers register their own state.

Rules for providers:

- Names, shapes and types of tensors are fixed from registration on, and are the same on every rank.
- :meth:`Provider.tensors` returns the live tensors, which are loaded in place. They change within a step
  only: between two steps they are read-only, so that a copy can be taken of them beside training.
- Values describe the state after the last finished step. They are the same on every rank, unless the
  provider says otherwise.
"""

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

MAX_VALUES_BYTES: Final = 256 * 1024
"""Most bytes of JSON that one provider's values may take: they travel whenever a group forms, and are in
every manifest."""

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
"""Names that no module of a task may have. ``ema`` and ``loss_scale`` are taken where the file asks for them
alone, because tasks are older than these."""

Values = Mapping[str, Any]


class Provider(Protocol):
    """One named part of a run's state."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Live tensors by this provider's own names; empty if it has none."""

    def values(self) -> Values:
        """JSON values that belong to the state after the last finished step; empty if there are none."""

    def load_values(self, values: Values) -> None:
        """Take over what :meth:`values` returned for the state that is being restored, in this process or in
        another.

        An empty mapping means that the state was saved before this provider existed. Tensors may not have
        arrived yet.
        """

    def reset(self) -> None:
        """Go back to the state before the first step, tensors in place. The same bits in every process."""


@dataclass(frozen=True)
class TensorSpec:
    """A registered tensor as a whole, whatever part of it a rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Registry:
    """All providers of one process, in the order in which they were registered."""

    def __init__(self) -> None:
        self._providers: dict[str, Provider] = {}

    def register(self, name: str, provider: Provider) -> None:
        """Add a provider.

        ``name`` has no dot, since it is the first part of its tensors' names. Raises ValueError.
        """
        # A dot would let two providers make tensors of one name.
        if not name or "." in name or name in self._providers:
            raise ValueError(
                f"the state registry cannot take {name!r}: names are unique and without dots"
            )
        self._providers[name] = provider

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor as ``<provider>.<name>``: what a checkpoint holds and what is
        transferred to a newcomer."""
        return {
            f"{name}.{own}": tensor
            for name, provider in self._providers.items()
            for own, tensor in provider.tensors().items()
        }

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor as a whole, ordered by name, the same on every rank and in every world."""
        # By name, because an older version may have registered the providers in another order.
        tensors = self.tensors()
        return tuple(
            TensorSpec(name, tuple(tensors[name].shape), tensors[name].dtype)
            for name in sorted(tensors)
        )

    def values(self) -> dict[str, Values]:
        """Each provider's values by its name; providers without any are left out.

        Raises ValueError if they are too many.
        """
        # Bounded here and not where they are read: a state that cannot be saved must not be trained.
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
        """Give every provider its values, in the order of registration. ``only``: these alone.

        Values of unknown providers are ignored.
        """
        # Those without values, too: an empty mapping says that the state is older than the provider.
        for name, provider in self._providers.items():
            if only is None or name in only:
                provider.load_values(values.get(name, {}))

    def reset(self) -> None:
        """Go back to the state before the first step."""
        for provider in self._providers.values():
            provider.reset()


@dataclass(frozen=True)
class Agreement:
    """Registers what is no state but is looked at whenever the run continues: it is saved, and compared on
    loading."""

    value: Callable[[], Values]
    """Its value here and now."""
    check: Callable[[Values], None] | None = None
    """Compares with what it was when the state was saved, and says or raises what differs. None: what refuses
    another one reads the checkpoint's manifest itself, before anything is loaded."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return nothing: an agreement has no tensors."""
        return {}

    def values(self) -> Values:
        """Return what it is now."""
        return self.value()

    def load_values(self, values: Values) -> None:
        """Compare; states of older versions may say nothing."""
        if values and self.check is not None:
            self.check(values)

    def reset(self) -> None:
        """Change nothing."""


def to_extra(values: Mapping[str, Values]) -> dict[str, Any]:
    """Arrange values as the ``extra`` of a checkpoint's manifest.

    Counters lie flat in it, ``cursor`` and ``model`` beside them, as the first versions wrote them; all
    others under ``state``.
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
    """Read what :func:`to_extra` wrote, or a version before it, in which Adam's step was one of
    the counters."""
    # Values that have no other name lay flat in the manifest of the first versions, and still do.
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
    # Before there was a registry, Adam's step was the number of updates.
    if "state" not in extra:
        values[OPTIMIZER] = {"step": float(extra.get("updates", extra["step"]))}
    return values


def recipe_in(extra: Mapping[str, Any]) -> Values:
    """The recipe that a checkpoint was made with, field by field; empty where an older version wrote it."""
    state = extra.get("state")
    recipe = state.get(RECIPE) if isinstance(state, Mapping) else None
    return recipe if isinstance(recipe, Mapping) else {}

"""The interface of a recipe: all that its author imports, and all that the core knows of what is trained.

A task owns what is trained: its options, preparation, sources, stages, modules, loss and evaluators. The core
owns the rest: the order of the samples and their hash, the step and its collectives, the optimizer,
checkpoints, resumption, changes of the world. Each method is called on every rank with the same arguments,
but for :meth:`Task.loss`, whose batches the ranks share.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from evergrad_manifest.model.base import Section
from evergrad_manifest.training import Training
from evergrad_trainer.base.records import EvaluationRecord, StepRecord, Wish
from evergrad_trainer.data.batch import Batch, Rows, Source, Stage
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.observers.base import BaseObserver, Observer

__all__ = [
    "BaseObserver",
    "Batch",
    "EvaluationRecord",
    "Evaluator",
    "Loss",
    "Modules",
    "Observer",
    "Prepared",
    "Rows",
    "Section",
    "Setup",
    "Snapshot",
    "Source",
    "Stage",
    "StepRecord",
    "Task",
    "Tensors",
    "Wish",
    "full_tensor",
]

Tensors = Mapping[str, Tensor]
"""The tensors of one micro-batch, by the names of its source."""


@dataclass(frozen=True)
class Setup:
    """Parts that a task is made from: the file's typed section, the recipe's own options, the directory that
    relative paths begin in, and that of the run, whose ``run.json`` says what it has begun with; None where
    only the data are looked at."""

    training: Training
    options: Any
    base_directory: Path
    run_directory: Path | None = None


@dataclass(frozen=True)
class Loss:
    """The part that one micro-batch adds to its step.

    ``total``: a differentiable sum, not a mean: the step divides by the weight of all micro-batches, so that
    the result depends neither on their number nor on who computes them. ``parts``: further sums over the same
    weight, one for each of :attr:`Task.metrics` that the stage has; their means become metrics of the step.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The weights of a frozen module that are those of a trained one as they were after a step.

    ``of``: the trained module, of the same kind. ``after``: the step, such as a stage's last; until it is
    finished the frozen module's weights mean nothing.
    """

    of: str
    after: int


@dataclass
class Modules:
    """Modules and tensors that a task computes with.

    ``trained``: optimised, saved, given to newcomers. ``frozen``: never changed and never saved: each process
    makes them again in :meth:`Task.build`, and a checkpoint holds their hashes, so that a run goes on with
    the same ones only. ``kept``: further tensors that are saved and given to newcomers (snapshots, averages);
    changed in place, and only where all ranks do so alike: in :meth:`Task.enter` and
    :meth:`Task.after_update`. ``blocks``: parts of the modules to compile, checkpoint and shard one by one; a
    module without any has the modules of its longest ModuleList. ``replicated``: frozen modules that no
    process holds a part of. ``counterparts``: frozen modules whose results are compared with those of trained
    ones of their kind, and which are compiled and cut as these are, however small. ``snapshots``: frozen
    modules that :meth:`Task.build` gives no weights: the core copies them from a trained module after a step,
    whose checkpoint is kept for as long as the run lasts. Their hash is saved, and a newcomer or a resumed
    run gets the same bits from a member that has them or from that checkpoint. ``begins_behind``: the step of
    the checkpoint in the run of ``initFrom`` that a frozen module was read from: a fresh run begins with that
    one, although a newer one may have come since.

    The names of trained modules have no dots and are none of the state's own, such as ``optimizer``.

    ``parallelism: fsdp2`` cuts each trained module, and of the frozen ones that are not in ``replicated``
    those of 64 MiB or more, the snapshots and the counterparts. It computes as what is whole does: under
    autocast, the weights of linear layers and convolutions are gathered in the type of the products, which
    autocast would round them to, and all others, what modules are called with and what they return have the
    types that they have elsewhere. A module that is cut is whole while it is called; outside of its call each
    rank holds a part of its weights: see :func:`full_tensor`. Each call gathers them, so that all ranks call
    the same modules in the same order, whatever their batches hold; a rank that leaves one out lets the
    others wait in vain. Hooks on the gradients of trained parameters are refused: FSDP2 would not call them.
    Kept tensors are whole on every rank.
    """

    trained: dict[str, nn.Module]
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    blocks: Sequence[nn.Module] = ()
    replicated: Collection[str] = ()
    counterparts: Collection[str] = ()
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    begins_behind: int | None = None

    def root(self) -> nn.Module:
        """All trained modules as one: what is optimised and saved.

        A single one named "model" stands for itself.
        """
        if list(self.trained) == ["model"]:
            return self.trained["model"]
        return nn.ModuleDict(self.trained)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a module's weight, to be read in :meth:`Task.enter` and :meth:`Task.after_update`.

    Under ``parallelism: fsdp2`` it is gathered, so that all ranks call this for the same weights in the same
    order; elsewhere it is ``tensor`` itself.
    """
    # Not by its type, whose import takes a second that a file which is only checked should not wait for.
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


@dataclass(frozen=True)
class Evaluator:
    """A named measurement between two steps, over all items of ``sources`` (or as many as the file asks for).

    ``measure``: sums of one micro-batch, as :meth:`Task.loss`, which is the default. The means of its total
    and of its parts are the evaluation's ``loss`` and metrics. ``metrics``: the names of its parts with their
    help; by default the task's. ``summarize``: makes the metrics of the means of the parts, where they are no
    means themselves, such as the root of one; ``parts`` names the parts then.

    Under ``measure`` each call of a trained module looks whether the group of processes still is, so that one
    that makes many calls, as generation does, ends where a peer is lost.
    """

    sources: Sequence[Source]
    measure: Callable[[Modules, Tensors, Stage], Loss] | None = None
    metrics: Mapping[str, str] | None = None
    parts: Sequence[str] | None = None
    summarize: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None


class Task(Protocol):
    """A recipe: what is trained. Made once in each process, from a :class:`Setup`.

    A class variable ``loss_items`` names, in the plural, what the weight of its batches counts where that is
    not tokens: reports name the unit of the loss by it, and show no perplexity.
    """

    Options: ClassVar[type[Section]]
    """The model of ``spec.training.options``."""
    metrics: ClassVar[Mapping[str, str]]
    """The names of a loss's parts, each with a line of help. All losses have just these parts, but for those
    that their stage is without."""

    def __init__(self, setup: Setup) -> None: ...

    def prepare(self, prepared: Prepared, folder: Path) -> Mapping[str, Any]:
        """Prepare data that are no text, before the first step of each start, once on each node.

        The data that the file's ``data`` describe are prepared already. ``folder`` is kept between starts,
        one for each content of the task's files and options, so that what is found there whole need not be
        made again. One process at a time is in it where the file system has locks. Where it has none (some
        network volumes), nodes may be in it together: write under a name of the process's own, and rename.

        Returns JSON values. They come to :meth:`stages` and :meth:`evaluators` as ``prepared.facts``, with
        the folder as ``prepared.folder``, also in other processes.
        """

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """Sources of each stage, and how they are mixed. Only the last stage has no end."""

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """Measurements between steps, by name."""

    def observers(self) -> Sequence[Observer]:
        """Observers of steps and evaluations, on every rank; their state is saved.

        They may ask for a stop, a save or an evaluation.
        """

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """The modules with their initial values, on the CPU: a function of the seed alone, which the core has
        set.

        ``build_model`` makes the model that ``spec.training.model`` describes.
        """

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """The sums of one micro-batch, whose tensors are on the device. May be compiled; changes nothing.

        Under ``parallelism: fsdp2`` it calls the same modules in the same order for every batch, since the
        ranks call them together: see :class:`Modules`.
        """

    def enter(self, modules: Modules, stage: Stage) -> None:
        """Prepare the modules for ``stage``, at the end of the step before it; for the first stage after they
        were built.

        Changes tensors alone: a newcomer and a resumed run get those, and no calls for stages that were
        entered before. Random numbers of torch are the same on every rank.
        """

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        """Change kept tensors after an update.

        ``metrics``: the step's, the same on every rank. No collectives but :func:`full_tensor`; random
        numbers as in :meth:`enter`.
        """

"""The interface of a recipe: everything that its author imports, and everything that the core uses of it.

A task defines what is trained: its options, preparation, sources, stages, modules, loss and evaluators. The
core provides the rest: the order of the samples and their hash, the step and its collectives, the optimizer,
checkpoints, resumption, and changes of the world. Each method is called on every rank with the same
arguments, except :meth:`Task.loss`, whose batches are divided between the ranks.
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
    """The arguments with which a task is created.

    ``training``: the typed section ``spec.training`` of the file. ``options``: the recipe's own options.
    ``base_directory``: the directory that relative paths start from. ``run_directory``: the directory of the
    run, whose ``run.json`` records what the run started with; None if only the data are read.
    """

    training: Training
    options: Any
    base_directory: Path
    run_directory: Path | None = None


@dataclass(frozen=True)
class Loss:
    """The part that one micro-batch adds to its step.

    ``total``: a differentiable sum, not a mean: the step divides by the weight of all micro-batches, so that
    the result depends neither on their number nor on the ranks that compute them.
    ``parts``: further sums over the same weight, one for each of :attr:`Task.metrics` that the stage has;
    their means become metrics of the step.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A frozen module whose weights are copied from a trained module after a given step.

    ``of``: the name of the trained module, which has the same structure. ``after``: the step, for example the
    last step of a stage; the frozen module's weights are undefined until that step is finished.
    """

    of: str
    after: int


@dataclass
class Modules:
    """Modules and tensors that a task computes with.

    ``trained``: optimised, saved, and sent to nodes that join. ``frozen``: never changed and never saved:
    each process makes them again in :meth:`Task.build`, and a checkpoint holds their hashes, so that a run
    resumes only with the same frozen modules. ``kept``: further tensors that are saved and sent to nodes
    that join, for example averages; they are changed in place, and only in :meth:`Task.enter` and
    :meth:`Task.after_update`, which make the same change on every rank. ``blocks``: parts of the modules to
    compile, checkpoint and shard one by one; if a module has none, the items of its longest ModuleList are
    used. ``replicated``: frozen modules that no process holds a part of. ``counterparts``: frozen modules
    whose results are compared with the results of trained modules of the same kind; they are compiled and
    sharded like the trained modules, whatever their size. ``snapshots``: frozen modules that
    :meth:`Task.build` gives no weights: the core copies them from a trained module after a step, whose
    checkpoint is kept for as long as the run lasts. Their hash is saved, and a node that joins or a resumed
    run gets the same bits from a member that has them or from that checkpoint. ``begins_behind``: the step
    of the checkpoint in the run of ``initFrom`` that a frozen module was read from: a fresh run starts from
    that checkpoint, even if the other run has saved a newer one since.

    The names of trained modules have no dots and differ from the names that the state uses itself,
    for example ``optimizer``.

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

        If the only trained module is named "model", it is returned itself.
        """
        if list(self.trained) == ["model"]:
            return self.trained["model"]
        return nn.ModuleDict(self.trained)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a module's weight, to be read in :meth:`Task.enter` and :meth:`Task.after_update`.

    Under ``parallelism: fsdp2`` the weight is gathered: call this function for the same weights in the same
    order on all ranks. Otherwise ``tensor`` itself is returned. For example, a weight of shape [V, H] that is
    sharded over 4 ranks is returned with shape [V, H] on each of them.
    """
    # Do not check the type: importing it takes a second, even if a file is only validated.
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


@dataclass(frozen=True)
class Evaluator:
    """A named measurement between two steps, over all items of ``sources`` (or as many as the file asks for).

    ``measure``: sums of one micro-batch, as :meth:`Task.loss`, which is the default. The means of its total
    and of its parts are the evaluation's ``loss`` and metrics. ``metrics``: the names of its parts with their
    help; by default the task's. ``summarize``: computes the metrics from the means of the parts, if the
    metrics are not means themselves, for example the root of a mean; ``parts`` then names the parts.

    Under ``measure`` each call of a trained module checks that the group of processes still exists, so that a
    measurement that makes many calls, for example generation, ends if a peer is lost.
    """

    sources: Sequence[Source]
    measure: Callable[[Modules, Tensors, Stage], Loss] | None = None
    metrics: Mapping[str, str] | None = None
    parts: Sequence[str] | None = None
    summarize: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None


class Task(Protocol):
    """A recipe: what is trained. Created once in each process, from a :class:`Setup`.

    If the weight of its batches does not count tokens, a class variable ``loss_items`` names the counted
    items in the plural. Reports then use it as the unit of the loss, and show no perplexity.
    """

    Options: ClassVar[type[Section]]
    """The model of ``spec.training.options``."""
    metrics: ClassVar[Mapping[str, str]]
    """The names of a loss's parts, each with a line of help. Each loss has exactly these parts, except
    the parts that its stage does not have."""

    def __init__(self, setup: Setup) -> None: ...

    def prepare(self, prepared: Prepared, folder: Path) -> Mapping[str, Any]:
        """Prepare data other than text, before the first step of each start, once on each node.

        The data that the file's ``data`` describe are prepared already. ``folder`` is kept between starts,
        one for each content of the task's files and options, so that complete files in it need not be made
        again. If the file system has locks, one process at a time uses the folder. If it has none (some
        network volumes), several nodes may use it at the same time: write to a file with a unique name, then
        rename it.

        Returns JSON values. They come to :meth:`stages` and :meth:`evaluators` as ``prepared.facts``, with
        the folder as ``prepared.folder``, also in other processes.
        """

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """Return the sources of each stage, and how they are mixed. Only the last stage has no end.

        For example, a curriculum returns two stages: short rows for 1,000 steps, then long rows.
        """

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """Return measurements between steps, by name."""

    def observers(self) -> Sequence[Observer]:
        """Return observers of steps and evaluations, which run on every rank and whose state is saved.

        They may request a stop, a save or an evaluation.
        """

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """Return the modules with their initial values, on the CPU. They must depend only on the seed, which
        the core has set.

        ``build_model`` builds the model that ``spec.training.model`` describes.
        """

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """Return the sums of one micro-batch, whose tensors are on the device. It may be compiled and must
        change nothing.

        Under ``parallelism: fsdp2``, call the same modules in the same order for every batch, because the
        ranks call them together: see :class:`Modules`.
        """

    def enter(self, modules: Modules, stage: Stage) -> None:
        """Prepare the modules for ``stage``, at the end of the previous step, or after the build for the
        first stage.

        Change only tensors: a node that joins and a resumed run receive these tensors, but this method is not
        called again for stages that were entered before. Random numbers of torch are the same on every rank.
        """

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        """Change kept tensors after an update.

        ``metrics``: the metrics of the step, the same on every rank. Call no collectives except
        :func:`full_tensor`. Random numbers are as in :meth:`enter`.
        """

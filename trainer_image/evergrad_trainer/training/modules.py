"""What a task's modules must be like before anything is trained with them, and the hashes of those that are
never saved."""

from typing import Final

from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.errors import ModelError
from evergrad_trainer.models.parallel import transformer_blocks
from evergrad_trainer.recipes.own import Code
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.registry import RESERVED
from evergrad_trainer.state.replicas import hash_state
from evergrad_trainer.task import Modules

_RECIPE: Final = "spec.training.recipe"
_PARALLELISM: Final = "spec.training.runtime.parallelism"
_UNCUT: Final = "use parallelism: dataParallel; a run goes on from its checkpoints with it"
"""Parallelism is no part of the recipe: it may be changed for a run that an earlier version has begun."""


def check_modules(modules: Modules, training: Training, code: Code) -> None:
    """Refuse modules that could not be saved or trained; all ranks build the same ones, and so all refuse.

    Raises TaskInputError or TaskError with the first problem.
    """
    for problem in module_problems(modules, training):
        raise code.explain(problem)


def module_problems(modules: Modules, training: Training) -> list[Problem]:
    """Why the state of these modules could not be registered, or not be cut over ranks."""
    problems = []
    for name in modules.trained:
        why = ""
        if not name or "." in name:
            why = "it is the first part of the names of its tensors, which a dot ends"
        elif name in RESERVED:
            why = f"{name} is another part of the run's state"
        elif hasattr(nn.ModuleDict(), name):
            # All trained modules become children of one module, whose own attributes they must not hide.
            why = "a module has an attribute of that name"
        if why:
            what = f"build names a trained module {name!r}"
            problems.append(Problem(_RECIPE, what, why, "Rename it"))

    parameters = [one for module in modules.trained.values() for one in module.parameters()]
    if not any(one.requires_grad for one in parameters):
        why = "no parameter of its trained modules requires a gradient"
        problems.append(
            Problem(_RECIPE, "build gives nothing to train", why, "Put a module into trained")
        )
    # A parameter that is both would be saved as trained and hashed as frozen.
    frozen = {id(one) for module in modules.frozen.values() for one in module.parameters()}
    if any(id(one) in frozen for one in parameters):
        what = "build gives a parameter as trained and as frozen"
        why = "it can be only one of them"
        problems.append(Problem(_RECIPE, what, why, "Copy the module that stays as it is"))
    if training.runtime.parallelism == "fsdp2":
        problems += _sharding_problems(modules)
    return problems


def _sharding_problems(modules: Modules) -> list[Problem]:
    """A world of one is refused as well: a run that grows must not meet the refusal in its middle."""
    problems = []
    if list(modules.trained) != ["model"]:
        # Weights that no block holds are gathered when the root is called, and nothing calls several at once.
        what = f"fsdp2 cannot cut the trained modules {', '.join(modules.trained)}"
        why = "it cuts one module, which build names 'model'"
        remedy = f"Make them parts of one module, or {_UNCUT}"
        problems.append(Problem(_PARALLELISM, what, why, remedy))
    if modules.kept:
        some = ", ".join(list(modules.kept)[:3])
        what = f"fsdp2 does not go with the kept tensors {some}"
        why = "every rank holds those whole, and only a part of each weight"
        remedy = f"Keep nothing, or {_UNCUT}"
        problems.append(Problem(_PARALLELISM, what, why, remedy))
    return problems


def find_blocks(modules: Modules) -> list[nn.Module]:
    """Find the blocks whose activations are computed again: those that the task names, or else the repeated
    ones of what is trained.

    Raises ModelError where there are none: the file asks for memory that it would not get.
    """
    blocks = list(modules.blocks)
    if not blocks:
        for module in modules.trained.values():
            blocks += transformer_blocks(module)
    if blocks:
        return blocks
    raise ModelError(
        Problem(
            "spec.training.runtime.activationCheckpointing",
            "what is trained has no repeated blocks",
            "activations are computed again block by block",
            "Name the blocks in the task's Modules, or leave activationCheckpointing out",
        )
    )


def hash_frozen(modules: Modules) -> dict[str, str]:
    """The content of each frozen module, as 16 hex digits."""
    return {
        name: f"{hash_state(module_tensors(module)) % 2**64:016x}"
        for name, module in modules.frozen.items()
    }

"""Imports transformers without reading the sources of all of its models."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_TOOLS = "transformers.utils.import_utils"
"""Has the two names that are replaced: the list of a folder's models, and the module made of such a list."""
_TABLES = (
    "_modules",
    "_class_to_module",
    "_object_missing_backend",
    "_import_structure",
    "__all__",
)
"""Tables in which a module of transformers keeps its names."""


def import_transformers() -> None:
    """Import transformers, and leave the list of all its models for whoever asks for a name that is in it.

    transformers finds out what its two thousand model files hold by reading each of them, at its import:
    most of a second, and the same again for ``transformers.models``. A model that is imported by its own
    path needs no list. Nothing changes where transformers has been imported already, or where its version
    has no such list.
    """
    if "transformers" in sys.modules:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("transformers")
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces names of one module as soon as its code has run, before another takes them from it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own way to be loaded, with the replacement behind it."""
        if fullname != _TOOLS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        run: Callable[[types.ModuleType], None] = loader.exec_module

        def run_and_replace(module: types.ModuleType) -> None:
            run(module)
            _postpone_lists(module)

        loader.exec_module = run_and_replace
        return spec


class _NoList(dict[frozenset[str], dict[str, Any]]):
    """The list of a folder that has not been read: no names, and how to get them."""

    def __init__(self, read: Callable[[], dict[Any, dict[str, Any]]]) -> None:
        super().__init__({frozenset(): {}})
        self.read = read


def _postpone_lists(tools: Any) -> None:
    """Let the list of all models be made by the first name that is in no other."""
    define, plain = (
        getattr(tools, name, None) for name in ("define_import_structure", "_LazyModule")
    )
    if define is None or plain is None:
        return
    models = Path(tools.__file__).parent.parent / "models"

    def list_later(module_path: str | Path, prefix: str | None = None) -> Any:
        path = Path(module_path)
        folder = path.parent if path.name == "__init__.py" else path
        if folder != models:
            return define(module_path, prefix)
        # By one spelling of the path, under which the list of the folder is kept when it is made.
        return _NoList(lambda: define(folder, prefix))

    class ListedLater(plain):  # type: ignore[misc, valid-type]
        """A module of transformers that makes its list when a name is asked for that it does not know."""

        def __init__(
            self, name: str, module_file: str, import_structure: Any, **more: Any
        ) -> None:
            super().__init__(name, module_file, import_structure, **more)
            self._unread: _NoList | None = None
            if isinstance(import_structure, _NoList):
                self._unread = import_structure
                # Asked for by `import *` and by dir().
                del self.__all__

        def __getattr__(self, name: str) -> Any:
            is_known = any(name in vars(self).get(table, ()) for table in _TABLES[:3])
            # Others look for such names in every module: inspect, warnings, pickle.
            is_private = name.startswith("_") and name != "__all__"
            unread = vars(self).get("_unread") is not None
            if unread and not is_known:
                place = Path(vars(self)["__file__"]).parent / name
                if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
                    # `from transformers import initialization` asks for the name before it imports the part.
                    return importlib.import_module(f"{self.__name__}.{name}")
                if not is_private:
                    _read_list(self, plain)
                    if name in vars(self):
                        return vars(self)[name]
            return super().__getattr__(name)

        def __reduce__(self) -> Any:
            _read_list(self, plain)
            return (plain, super().__reduce__()[1])

    tools.define_import_structure = list_later
    tools._LazyModule = ListedLater


def _read_list(module: Any, plain: Any) -> None:
    """Make the list of ``module``, and give it the names that it would have had from its import on."""
    unread = module._unread
    if unread is None:
        return
    # Entries that the package itself has added to the empty list, and what its folder holds.
    structure = {backends: dict(names) for backends, names in unread.read().items()}
    for backends, names in unread.items():
        structure.setdefault(backends, {}).update(names)
    whole = plain(module.__name__, module.__file__, structure)
    tables = {table: vars(whole)[table] for table in _TABLES if table in vars(whole)}
    vars(module).update(tables)
    module._unread = None

"""Imports transformers without reading the source files of all its models."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_TOOLS = "transformers.utils.import_utils"
"""The module with the two replaced names: the function that lists the models of a folder, and the module
class that is built from such a list."""
_TABLES = (
    "_modules",
    "_class_to_module",
    "_object_missing_backend",
    "_import_structure",
    "__all__",
)
"""Attributes in which a module of transformers stores its names."""


def import_transformers() -> None:
    """Import transformers, and postpone the list of all its models until a name in the list is requested.

    At import, transformers reads each of its two thousand model files to list its classes. This takes most
    of a second, and the same time again for ``transformers.models``. A model that is imported by its own
    module path needs no list. This function has no effect if transformers is already imported, or if its
    version has no such list.
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
    """Replaces names of a module directly after its code has run, before other modules import them."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the regular spec of the module, with a loader that then replaces the names."""
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
    """An empty placeholder for the list of a folder. ``read`` returns the real list."""

    def __init__(self, read: Callable[[], dict[Any, dict[str, Any]]]) -> None:
        super().__init__({frozenset(): {}})
        self.read = read


def _postpone_lists(tools: Any) -> None:
    """Postpone building the list of all models until a name is requested that no other table contains."""
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
        # Always use the same spelling of the path, because define caches the list by this path.
        return _NoList(lambda: define(folder, prefix))

    class ListedLater(plain):  # type: ignore[misc, valid-type]
        """A module of transformers that builds its list when an unknown name is requested."""

        def __init__(
            self, name: str, module_file: str, import_structure: Any, **more: Any
        ) -> None:
            super().__init__(name, module_file, import_structure, **more)
            self._unread: _NoList | None = None
            if isinstance(import_structure, _NoList):
                self._unread = import_structure
                # `import *` and dir() request __all__. Delete it, so that the request reaches __getattr__.
                del self.__all__

        def __getattr__(self, name: str) -> Any:
            is_known = any(name in vars(self).get(table, ()) for table in _TABLES[:3])
            # Do not build the list for private names: inspect, warnings and pickle look them up in every
            # module.
            is_private = name.startswith("_") and name != "__all__"
            unread = vars(self).get("_unread") is not None
            if unread and not is_known:
                place = Path(vars(self)["__file__"]).parent / name
                if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
                    # `from transformers import initialization` requests the name before the submodule is
                    # imported.
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
    """Build the list of ``module``, and set the names that the module would have after a regular import."""
    unread = module._unread
    if unread is None:
        return
    # Merge the entries that the package added to the empty list with the list of its folder.
    structure = {backends: dict(names) for backends, names in unread.read().items()}
    for backends, names in unread.items():
        structure.setdefault(backends, {}).update(names)
    whole = plain(module.__name__, module.__file__, structure)
    tables = {table: vars(whole)[table] for table in _TABLES if table in vars(whole)}
    vars(module).update(tables)
    module._unread = None

"""The base of every section of the manifest: frozen, strict about keys, camelCase on the wire."""

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Strict
from pydantic.alias_generators import to_camel

from evergrad_manifest.values.numbers import NumberError, show, with_whole_numbers


class Section(BaseModel):
    """A part of the manifest. Unknown keys are refused; values never change after parsing.

    Only single fields are checked here. Rules about several fields together are functions over the values
    that could be parsed, so that one wrong field does not hide another.
    """

    model_config = ConfigDict(  # type: ignore[pydantic-alias]  # built from the wire only, never by keyword
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=False,
        serialize_by_alias=True,
        protected_namespaces=(),
        validate_default=True,
        use_attribute_docstrings=True,
    )


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class FieldValueError(NumberError):
    """A value is refused for a specific reason. ``what``, ``why`` and ``remedy`` are parts of a Problem."""


def check_local_path(path: str) -> str:
    """Return ``path``. Raises FieldValueError if it is a URL, begins with ``~``, or is not a valid path."""
    if _URL.match(path):
        remedy = "Download it and name its path"
        raise FieldValueError(
            f"{show(path)} is a URL", "only local files and directories are read", remedy
        )

    # A shell would expand it, but a program does not.
    if path.startswith("~"):
        remedy = "Write the whole path, or one relative to the file"
        raise FieldValueError(f"{show(path)} begins with ~", "it is not expanded", remedy)
    if not path.strip() or any(
        ord(character) < ord(" ") or character == "\x7f" for character in path
    ):
        remedy = "Name a file or directory"
        raise FieldValueError(
            f"{show(path)} cannot be a path",
            "it is blank or has control characters",
            remedy,
        )
    return path


Switch = Annotated[bool, Strict()]
"""true or false, and no value that only resembles them."""
LocalPath = Annotated[str, AfterValidator(check_local_path)]
"""A path of this machine (or pod): no URL, no ``~``, no control characters."""
FreeMapping = Annotated[dict[str, Any], AfterValidator(with_whole_numbers)]
"""A mapping with user-defined values, such as a transformers configuration. Its numbers have no declared
type, so they are converted to the form that an API server stores."""

"""The base of every section of the manifest: frozen, strict about keys, camelCase on the wire."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Section(BaseModel):
    """A part of the manifest. Unknown keys are refused; values never change after parsing."""

    model_config = ConfigDict(
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

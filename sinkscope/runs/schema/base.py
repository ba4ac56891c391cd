"""The base of all records of a run folder: it refuses unknown fields and turns missing numbers into None."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from sinkscope.errors import SinkscopeError


def _missing_as_none(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_missing_as_none)]
"""A measured number. A missing (NaN) or infinite one is None, and null in JSON."""


class Record(BaseModel):
    """A record that refuses missing and unknown fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in the order of the fields."""
        return self.model_dump(mode="json", by_alias=True)


R = TypeVar("R", bound=BaseModel)


def read_record(kind: type[R], data: Any, where: str) -> R:
    """Reads a record from `data`. Raises SinkscopeError that names the first wrong field; `where` names the file."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        kind_of_error = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        raise SinkscopeError(f"{where} is damaged: {f'{place}: ' if place else ''}{kind_of_error}") from None

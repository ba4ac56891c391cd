"""The base of all records of a run folder: it refuses unknown fields and turns missing numbers into None."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import reprlib
import sys
import textwrap
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from sinkscope.errors import SinkscopeError


def _missing_as_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_missing_as_none)]
"""A measured number. A missing (NaN) or infinite one is None, and null in JSON."""


class Record(BaseModel):
    """A record that refuses missing and unknown fields."""

    # Most records are only parts of others, and a command reads few: each is built when it is read.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in the order of the fields."""
        return self.model_dump(mode="json", by_alias=True)


def json_schema(kind: type[Record]) -> dict[str, Any]:
    """The JSON schema of a record. What stands below a field is its description, in the records within it too.

    pydantic would look for these sentences whenever a record's class is made, which takes a tenth of a second of every
    command. Only a schema shows them.
    """
    for record in _records_below(Record):
        for owner in reversed(record.__mro__):
            for name, words in _below_fields(owner).items() if issubclass(owner, Record) else ():
                record.model_fields[name].description = words
        record.model_rebuild(force=True)
    return kind.model_json_schema(mode="serialization")


def _records_below(kind: type[Record]) -> list[type[Record]]:
    return [record for subclass in kind.__subclasses__() for record in (subclass, *_records_below(subclass))]


def _below_fields(kind: type) -> dict[str, str]:
    """The string below each annotated name of a class, by name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


R = TypeVar("R", bound=BaseModel)


def read_record(kind: type[R], data: Any, where: str) -> R:
    """Reads a record from `data`. Raises SinkscopeError that names the first wrong field; `where` names the file."""
    try:
        return kind.model_validate(data)
    except SinkscopeError as error:  # a check of the record's own, which does not know the file
        raise SinkscopeError(f"{where}: {error}") from None
    except ValidationError as error:
        raise SinkscopeError(f"{where} is damaged: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, as `rules[0].level: must be 'layer' or 'head', not 'heads'`."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    words = {"extra_forbidden": "unknown key", "missing": "missing"}.get(first["type"])
    if words is None and first["type"] == "value_error":
        words = str(first["ctx"]["error"])
    elif words is None and first["type"] == "too_short":
        words = f"needs at least {first['ctx']['min_length']}"
    elif words is None:
        needed = first["msg"].replace("Input should", "must").partition(", unable to")[0]
        words = f"{needed}, not {reprlib.repr(first['input'])}"
    return f"{place}: {words}" if place else words


CODES = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def to_json(data: Any) -> str:
    """The text of a JSON file; NaN and infinities become null. What a terminal would take for a code, or for the other
    direction of writing, is escaped, as JSON itself escapes other control characters."""
    text = json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False)
    return CODES.sub(lambda code: f"\\u{ord(code[0]):04x}", text) + "\n"


def plain(data: Any) -> Any:
    """Converts data to JSON's types: NaN, infinities and pandas' NA become None, records become dictionaries."""
    if isinstance(data, str):
        return data
    if isinstance(data, Record):
        data = data.as_dict()
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if _is_na(data):
        return None
    if hasattr(data, "item"):
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def _is_na(data: Any) -> bool:
    """Whether it is pandas' NA, which nothing can be where pandas was never imported."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and data is pandas.NA

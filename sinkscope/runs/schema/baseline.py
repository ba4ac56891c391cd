"""A baseline file: how its run was measured, and the means and errors that a later run is judged by."""

from __future__ import annotations

from pydantic import Field

from sinkscope.runs.request import Request
from sinkscope.runs.schema.base import Number, Record
from sinkscope.runs.schema.manifest import FirstToken

SCHEMA_VERSION = 2
KIND = "sinkscope baseline"


class BaselineModel(Record):
    """The model whose run became the baseline."""

    id: str
    """Hub id, folder, .gguf file or example:NAME; the name of a model object."""
    revision: str | None
    """The commit of a hub model."""
    weights_sha256: str | None
    """SHA-256 over names and contents of the weight files; null for a model object."""
    class_: str | None = Field(alias="class")
    """Class of the model that was measured."""
    dtype: str | None
    """The dtype it was computed in."""
    device: str | None
    """Where it was."""
    tokenizer: str | None
    """Class of the tokenizer."""


class BaselineDomain(Record):
    """The sequences of one domain."""

    domain: str
    """Its name in the tables."""
    spec: str
    """The SPEC it was read from."""
    bos: str
    """How the first token was chosen."""
    fingerprint: str
    """SHA-256 of the token ids, and of the vectors where the model read vectors."""
    sequences: int
    """Number of sequences."""
    seq_len: int
    """Tokens of the longest sequence."""


class BaselineLevel(Record):
    """One domain at one level: a list of values a metric, in the order of the places."""

    domain: str
    """The domain."""
    level: str
    """summary, layer or head."""
    sequences: int
    """Sequences that the means are over."""
    stream: list[str]
    """Stream of each place."""
    layer: list[int] | None = None
    """Layer of each place; null at level summary."""
    head: list[int] | None = None
    """Head of each place; null at levels summary and layer."""
    mean: dict[str, list[Number]]
    """Mean over sequences, by metric."""
    sem: dict[str, list[Number]]
    """Its standard error, by metric."""
    count: dict[str, list[Number]]
    """Sequences that have a value, for the metrics that some sequences lack."""


class BaselineFile(Record):
    """The whole file."""

    schema_version: int = SCHEMA_VERSION
    """Version of this format."""
    kind: str = KIND
    """Tells a baseline from other JSON files."""
    sinkscope: str
    """Version of sinkscope that wrote it."""
    request: Request
    """What was asked for: `sinkscope check MODEL` asks the same of another model."""
    model: BaselineModel
    """The model."""
    data: list[BaselineDomain]
    """What was read, domain by domain."""
    first_token: FirstToken
    """The first token over all domains."""
    levels: list[BaselineLevel] = Field(default_factory=list)
    """Means and errors."""

"""The baseline file: how its run was measured, and the means and errors that later runs are compared with."""

from __future__ import annotations

from pydantic import Field

from sinkscope.runs.request import Request
from sinkscope.runs.schema.base import Number, Record
from sinkscope.runs.schema.manifest import AdapterFacts, FirstToken, with_adapter

SCHEMA_VERSION = 3
READ = (2, 3)
"""Versions that are read as they are, as those of manifests."""
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
    """The dtype that the model computed in."""
    device: str | None
    """The device that the model was on."""
    quantization: str | None = None
    """Method by which the weights are quantised; null where they are not, and in baselines of older versions."""
    tokenizer: str | None
    """Class of the tokenizer."""
    adapter: AdapterFacts | None = None
    """The PEFT adapter that was put into the model; null where there is none."""

    @property
    def shown(self) -> str:
        """The model for people to read: its id, and its adapter."""
        return with_adapter(self.id, None if self.adapter is None else self.adapter.path)


class BaselineDomain(Record):
    """The sequences of one dataset."""

    domain: str
    """Name of the dataset in the tables."""
    spec: str
    """The SPEC that the dataset was read from."""
    bos: str
    """How the first token was chosen."""
    fingerprint: str
    """SHA-256 of the token ids, and of what else the model read, such as vectors or pixels."""
    sequences: int
    """Number of sequences."""
    seq_len: int
    """Tokens of the longest sequence."""
    shortest: int | None = None
    """Tokens of the shortest sequence; null where all have `seq_len` tokens, and for runs that did not record it."""


class BaselineLevel(Record):
    """One dataset at one level: a list of values for each metric, in the order of the places."""

    domain: str
    """The dataset."""
    level: str
    """summary, layer or head."""
    sequences: int
    """Number of sequences that the means are over."""
    stream: list[str]
    """Stream of each place."""
    layer: list[int] | None = None
    """Layer of each place; null at level summary."""
    head: list[int] | None = None
    """Head of each place; null at levels summary and layer."""
    mean: dict[str, list[Number]]
    """Mean over sequences, by metric."""
    sem: dict[str, list[Number]]
    """Standard error of the mean, by metric."""
    count: dict[str, list[Number]]
    """Number of sequences that have a value, for the metrics that some sequences lack."""


class BaselineFile(Record):
    """The whole file."""

    schema_version: int = SCHEMA_VERSION
    """Version of this format and of what the columns mean."""
    kind: str = KIND
    """Tells a baseline from other JSON files."""
    sinkscope: str
    """Version of sinkscope that wrote it."""
    request: Request
    """The request of the run; `sinkscope check MODEL` asks the same of another model."""
    model: BaselineModel
    """The model."""
    data: list[BaselineDomain]
    """The sequences of each dataset."""
    first_token: FirstToken
    """The first token over all datasets."""
    hides: bool | None = None
    """Whether some attention call hides a key from a query that the order of positions lets see it; null in baselines
    of schema version 2 and older."""
    levels: list[BaselineLevel] = Field(default_factory=list)
    """Means and errors of each dataset at each level."""

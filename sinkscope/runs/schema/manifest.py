"""manifest.json: how a run was measured, so that another can be measured the same way."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sinkscope.inputs.passages import Passage
from sinkscope.runs.request import Request
from sinkscope.runs.schema.base import Number, Record

SCHEMA_VERSION = 2


class FirstToken(Record):
    """The first token of the sequences."""

    id: int | None
    """Its id; null where the sequences begin with different tokens."""
    text: str | None
    """The token as the vocabulary spells it; null where the sequences begin with different tokens."""
    distinct: int
    """How many different first tokens there are."""
    is_bos: bool | None
    """Whether it is the tokenizer's BOS (or CLS); null where the tokenizer names none."""


class ModelFacts(Record):
    """The model as it was loaded."""

    id: str
    """Hub id, folder, .gguf file or example:NAME; the name of a model object."""
    revision: str | None
    """The commit of a hub model."""
    weights_sha256: str | None
    """SHA-256 over names and contents of the weight files; null for a model object."""
    config_sha256: str | None = None
    """SHA-256 of the configuration as it was loaded; null for runs of 0.1."""
    tokenizer: str | None
    """Class of the tokenizer."""
    class_: str | None = Field(None, alias="class")
    """Class of the model that was measured."""
    model_type: str | None = None
    """transformers' name of the architecture."""
    parameters: int | None = None
    """Number of parameters."""
    dtype: str | None = None
    """The dtype it was computed in."""
    device: str | None = None
    """Where it was; several places of a device map are separated by commas."""
    attention_implementation: str | None = None
    """What transformers calls the attention function in use."""
    max_positions: int | None = None
    """Positions the configuration allows; null where it names no limit."""
    quantization: str | None = None
    """Method by which the weights are quantised."""


class DomainFacts(Record):
    """The sequences read for one domain: one SPEC with one way to choose the first token."""

    domain: str
    """Its name in the tables."""
    spec: str
    """The SPEC it was read from."""
    fingerprint: str
    """SHA-256 of the token ids, and of the vectors where the model read vectors."""
    sequences: int
    """Number of sequences."""
    seq_len: int
    """Tokens of the longest sequence."""
    bos: str
    """How the first token was chosen: auto, always, never, or what stands for it where no text was read."""
    joined: int = 0
    """Sequences made of several documents."""
    dropped: int = 0
    """Documents left out because they are shorter than a sequence."""
    documents: list[str] = Field(default_factory=list)
    """What each sequence was read from, for people to read."""
    passages: list[list[Passage]] = Field(default_factory=list)
    """What each sequence was read from, by content: a list of [SHA-256 of the document, first token, past the last];
    null in the last place = to the document's end. Empty where no documents are read."""
    first_token: FirstToken | None = None
    """The first token of these sequences."""


class Kind(Record):
    """What a query of an attention call may see."""

    name: str
    """full, cross, sliding (the last `size` keys) or chunked (the keys of its chunk of `size`)."""
    size: int | None = None
    """Tokens of the window or chunk."""


class SiteFacts(Record):
    """One attention call of the model's forward pass."""

    stream: str
    """text, vision, audio, encoder, decoder or cross."""
    layer: int
    """Number of the layer in its stream."""
    kind: Kind
    """What a query may see."""
    path: str
    """interface: read inside transformers' attention interface; inline: where the model's softmax meets the values."""
    kernel: str | None
    """What summed its attention; null where the model formed the map itself."""
    score: str
    """softmax, or a score whose rows are no distribution."""
    causal: bool
    """No query sees a later key."""
    heads: int
    """Query heads."""
    kv_groups: int
    """Key/value heads."""
    head_dim: int | None
    """Width of q and k."""
    value_dim: int | None
    """Width of v."""
    module: str
    """Path of the attention module; `path[n]` for its n-th call."""
    block: str | None
    """Path of the layer it stands in."""
    projection: str | None
    """Path of the output projection."""


class SelfCheck(Record):
    """One sequence measured twice: by the scan's own capture and by a reference that forms every attention map."""

    status: str
    """passed, warning (half precision beyond its bound), not possible, or skipped."""
    tokens: int | None = None
    """Tokens of the sequence."""
    layers: int | None = None
    """Attention calls that were compared."""
    reference: str | None = None
    """What was compared with."""
    reason: str | None = None
    """Why the reference is not the model's own eager attention."""
    max_difference: Number = None
    """Largest difference of a probability."""
    bound: Number = None
    """Largest difference that is put down to rounding."""
    where: str | None = None
    """The attention call where the difference is largest."""


class MetricFacts(Record):
    """A metric that is not sinkscope's own: a user's, or an installed package's."""

    table: str
    """heads or layers."""
    unit: str
    """Its unit."""
    range: str
    """The values it can take."""
    formula: str
    """What it is, from its docstring."""
    source: str
    """The paper or repository that defines it."""
    shown: bool = True
    """Whether the table carries it, or only the values of each sequence."""
    sampled: bool = False
    """Whether it is measured on the first sequences of a domain only."""
    code_sha256: str
    """SHA-256 of the file that defines it."""


class Timing(Record):
    """How long the scan took."""

    scan_seconds: Number = None
    """Seconds in forward passes and metrics."""
    total_seconds: Number = None
    """Seconds from the call to the finished tables, loading included."""
    sequences_per_second: Number = None
    """Sequences measured in a second of `scan_seconds`."""


class TableFacts(Record):
    """Rows and column types of a table, since a CSV cannot tell a column of zeros from integers."""

    rows: int
    """Number of rows."""
    columns: dict[str, str]
    """Type of each column, in their order."""


class Manifest(Record):
    """How a run was measured."""

    schema_version: int = SCHEMA_VERSION
    """Version of this format."""
    sinkscope: str
    """Version of sinkscope that wrote the run."""
    command: str | None = None
    """The command line; null for a run made in Python."""
    created: str
    """When the scan began (UTC, ISO 8601)."""
    versions: dict[str, str]
    """Versions of Python and of the packages that decide numbers."""
    request: Request
    """What was asked for; the same request gives the same tables."""
    model: ModelFacts
    """The model as it was loaded."""
    data: list[DomainFacts]
    """What was read, domain by domain."""
    first_token: FirstToken
    """The first token over all domains."""
    decoder_input: str | None = None
    """What a decoder read beside the sequences."""
    self_check: SelfCheck
    """What the comparison with a reference found."""
    processes: int = 1
    """Processes that shared the scan."""
    tensor_parallel: int = 1
    """Processes that the heads of the model were spread over."""
    attention: list[SiteFacts]
    """The attention calls of a forward pass, in their order."""
    conventions: dict[str, str] = Field(default_factory=dict)
    """The formula of every column."""
    metrics: dict[str, MetricFacts] = Field(default_factory=dict)
    """The metrics that are not sinkscope's own, by name."""
    warnings: list[str] = Field(default_factory=list)
    """What the reader of the tables must know."""
    spectra_measured: dict[str, int] = Field(default_factory=dict)
    """Sequences of each domain that matrix_entropy was measured on: the most that any layer has."""
    complete: bool = True
    """False for a scan that was interrupted."""
    batch_size: int | None = None
    """Sequences a forward pass in the end: less than asked for where memory ran out."""
    sequences_done: int = 0
    """Sequences measured, over all domains."""
    timing: Timing = Timing()
    """How long it took."""
    tables: dict[str, TableFacts] = Field(default_factory=dict)
    """The tables of the run folder."""

    def decides(self) -> dict[str, Any]:
        """All that decides the numbers: a scan goes on with another's batches only where this is equal."""
        facts = self.model_dump(mode="json", by_alias=True, include=DECIDING)
        return {"request": self.request.part("text", "columns", "rounding")} | facts


DECIDING = {
    "schema_version", "sinkscope", "versions", "model", "data", "first_token", "decoder_input", "tensor_parallel",
    "attention", "metrics",
}  # fmt: skip
"""Fields of the manifest that decide numbers, beside the request."""

"""manifest.json: how a run was measured, so that another run can be measured the same way."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from pydantic import Field

from sinkscope.runs.passages import Passage
from sinkscope.runs.request import Request
from sinkscope.runs.schema.base import Number, Record


class Kind(Record):
    """What a query of an attention call may see."""

    name: str
    """full, cross, sliding (the last `size` keys; both ways, `size` - 1 on each side) or chunked (the keys of its chunk
    of `size`)."""
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
    """Where the attention is read. interface: inside transformers' attention interface; inline: where the model
    multiplies its own softmax with the values."""
    kernel: str | None
    """The kernel that summed the attention; null where the model formed the map itself."""
    score: str
    """softmax, or the name of another score."""
    normalised: bool | None = None
    """Whether the rows of the score are divided by their sum, as softmax's are; null for runs that did not record
    it."""
    causal: bool
    """Whether no query sees a later key."""
    hides: bool | None = None
    """Whether the mask hides a key from some query that the causal order, if there is one, lets see it, as windows,
    chunks and prefixes do; null in runs of schema version 2 and older."""
    heads: int
    """Number of query heads."""
    kv_groups: int
    """Number of key/value heads."""
    head_dim: int | None
    """Width of the queries and keys of a head."""
    value_dim: int | None
    """Width of the values of a head."""
    module: str
    """Path of the attention module; `path[n]` for its n-th call."""
    block: str | None
    """Path of the layer that contains the module."""
    projection: str | None
    """Path of the output projection."""


SCHEMA_VERSION = 3
READ = (2, 3)
"""Versions that are read as they are. 3 has every field of 2; `runs.moved` says what it measures otherwise."""


def with_adapter(model: str, adapter: str | None) -> str:
    """The name of a model and of the adapter it was measured with."""
    return model if adapter is None else f"{model} with {adapter}"


class FirstToken(Record):
    """The first token of the sequences."""

    id: int | None
    """Id of the token; null where the sequences begin with different tokens."""
    text: str | None
    """The token as the vocabulary spells it; null where the sequences begin with different tokens."""
    distinct: int
    """Number of different first tokens."""
    is_bos: bool | None
    """Whether the first token is the tokenizer's BOS (or CLS); null where the tokenizer names none."""


class AdapterFacts(Record):
    """A PEFT adapter that the model was measured with. It was put beside the base's weights, not merged."""

    path: str
    """Folder of the adapter."""
    kind: str
    """PEFT's name of the method, such as LORA."""
    base: str | None
    """The model that the adapter was trained on, as its adapter_config.json names it."""
    files: dict[str, str]
    """SHA-256 of each of the adapter's files, by name."""
    base_weights_sha256: str | None
    """The `weights_sha256` that the model has without the adapter."""


class ModelFacts(Record):
    """The model as it was loaded."""

    id: str
    """Hub id, folder, .gguf file or example:NAME; the name of a model object."""
    name: str | None = None
    """What tables, figures and pages call the model; null where the scan was given no name."""
    revision: str | None
    """The commit of a hub model."""
    weights_sha256: str | None
    """SHA-256 over names and contents of the weight files, and of the adapter's; null for a model object."""
    tensors_sha256: str | None = None
    """SHA-256 over the parameters and buffers of a model object whose batches were kept (`shards`), of the part that
    was measured; null for other models, and where they cannot be read."""
    config_sha256: str | None = None
    """SHA-256 of the configuration as it was loaded; null for runs of 0.1."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the tokenizer's serialisation or vocabulary files; null without a tokenizer and for runs of 0.1."""
    tokenizer: str | None
    """Class of the tokenizer."""
    class_: str | None = Field(None, alias="class")
    """Class of the model that was measured."""
    model_type: str | None = None
    """Name of the architecture in transformers."""
    parameters: int | None = None
    """Number of parameters; a quantised linear layer counts as if it were not quantised."""
    dtype: str | None = None
    """The dtype that the model computed in. If a watched program changed its model between two passes, this and the
    next two name all of them, sorted and joined by `and`."""
    device: str | None = None
    """The device that the model was on; several devices of a device map are separated by commas."""
    attention_implementation: str | None = None
    """Name of the attention function in transformers."""
    max_positions: int | None = None
    """Number of positions that the configuration allows; null where it names no limit."""
    quantization: str | None = None
    """Method by which the weights are quantised in the checkpoint, or in the model object; null where they are not, and
    for GGUF files."""
    adapter: AdapterFacts | None = None
    """The PEFT adapter that was put into the model; null where there is none."""

    @property
    def told(self) -> bool:
        """Whether a hash tells its weights from others."""
        return any(getattr(self, name) is not None for name in HASHES)

    @property
    def shown(self) -> str:
        """The model for people to read: the name that the scan was given, else its id, of which a long path keeps the
        last folder alone; and its adapter."""
        name = self.name or (PurePath(self.id).name if PurePath(self.id).is_absolute() else self.id)
        return with_adapter(name, None if self.adapter is None else self.adapter.path)

    @property
    def short(self) -> str:
        """`shown` where there is little room: of a hub id or a path, the last part alone. A name that the scan was
        given is neither, whatever it holds."""
        return self.shown if self.name else self.shown.rstrip("/").rpartition("/")[2]


class DomainFacts(Record):
    """The sequences of one dataset: one SPEC with one way to choose the first token."""

    domain: str
    """Name of the dataset in the tables."""
    spec: str
    """The SPEC that the dataset was read from."""
    fingerprint: str
    """SHA-256 of the token ids, and of what else the model read, such as vectors or pixels."""
    sequences: int
    """Number of sequences."""
    seq_len: int
    """Tokens of the longest sequence."""
    shortest: int | None = None
    """Tokens of the shortest sequence; null where all have `seq_len` tokens, and for runs that did not record it."""
    bos: str
    """How the first token was chosen: auto, always or never; for input that is no text, what takes its place."""
    joined: int = 0
    """Number of sequences made of several documents."""
    dropped: int = 0
    """Number of documents left out because they are shorter than a sequence."""
    documents: list[str] = Field(default_factory=list)
    """Name of the source of each sequence, for people to read."""
    passages: list[list[Passage]] = Field(default_factory=list)
    """The passages that each sequence was read from: [SHA-256 of the document, first token, end (exclusive)]; an end
    of null means the document's end. Empty where no documents are read."""
    first_token: FirstToken | None = None
    """The first token of these sequences."""


class SelfCheck(Record):
    """One sequence measured twice: by the scan's own capture and by a reference that forms every attention map."""

    status: str
    """passed, warning (half precision beyond its bound), not possible, or skipped."""
    tokens: int | None = None
    """Number of tokens in the sequence."""
    layers: int | None = None
    """Number of attention calls that were compared."""
    reference: str | None = None
    """The reference that the capture was compared with."""
    reason: str | None = None
    """Why the reference is not the model's own eager attention."""
    eager_difference: Number = None
    """Largest difference of a probability between the model's own eager attention and the attention that was measured,
    in the first attention call; null where rounding explains it."""
    max_difference: Number = None
    """Largest difference of a probability; for a watched model, that of an attention output relative to its size."""
    bound: Number = None
    """Largest difference that is attributed to rounding."""
    where: str | None = None
    """The attention call where the difference is largest."""


class MetricFacts(Record):
    """A metric that is not sinkscope's own: a user's, or an installed package's."""

    table: str
    """heads, layers, or the table of a question that an installed package brings."""
    unit: str
    """Unit of the metric."""
    range: str
    """Range of its values."""
    formula: str
    """Its formula, from its docstring."""
    source: str
    """The paper or repository that defines it."""
    shown: bool = True
    """Whether the table has the column, and not only the per-sequence values."""
    sampled: bool = False
    """Whether it is measured on the first sequences of each dataset only."""
    dormant: str | None = None
    """The end of its values, low or high, at which a head is dormant; null where neither says so."""
    code_sha256: str
    """SHA-256 of the file that defines it."""
    failed: str | None = None
    """Why it failed, so that no table has its columns; null where it did not."""


class KeywordFacts(Record):
    """A keyword of the model's attention whose effect code outside sinkscope declares."""

    package: str
    """The package, or the module, that declares it."""
    code_sha256: str
    """SHA-256 of the file that defines it."""


class Timing(Record):
    """How long the scan took."""

    scan_seconds: Number = None
    """Seconds spent on forward passes and metrics."""
    total_seconds: Number = None
    """Seconds from the call to the finished tables, including loading."""
    sequences_per_second: Number = None
    """Sequences measured per second of `scan_seconds`."""


class TableFacts(Record):
    """Rows and column types of a table; a CSV file does not say whether a column of zeros holds integers."""

    rows: int
    """Number of rows."""
    columns: dict[str, str]
    """Type of each column, in the order of the table."""


class Manifest(Record):
    """How a run was measured."""

    schema_version: int = SCHEMA_VERSION
    """Version of this format and of what the columns mean."""
    sinkscope: str
    """Version of sinkscope that wrote the run."""
    command: str | None = None
    """The command line; null for a run made in Python."""
    created: str
    """When the scan began (UTC, ISO 8601)."""
    versions: dict[str, str]
    """Versions of Python and of the packages that decide numbers."""
    request: Request
    """The request of the run; the same request gives the same tables."""
    model: ModelFacts
    """The model as it was loaded."""
    data: list[DomainFacts]
    """The sequences of each dataset."""
    first_token: FirstToken
    """The first token over all datasets."""
    decoder_input: str | None = None
    """What a decoder read in addition to the sequences."""
    self_check: SelfCheck
    """Result of the comparison with a reference."""
    processes: int = 1
    """Number of processes that shared the scan."""
    tensor_parallel: int = 1
    """Number of processes that the model's heads were spread over."""
    attention: list[SiteFacts]
    """The attention calls of a forward pass, in order."""
    conventions: dict[str, str] = Field(default_factory=dict)
    """The formula of every column."""
    metrics: dict[str, MetricFacts] = Field(default_factory=dict)
    """The metrics that are not sinkscope's own, by name."""
    keywords: dict[str, KeywordFacts] = Field(default_factory=dict)
    """The attention keywords that the model passes and that are not sinkscope's own but declared by others, by name."""
    warnings: list[str] = Field(default_factory=list)
    """Sentences that the reader of the tables must know."""
    spectra_measured: dict[str, int] = Field(default_factory=dict)
    """Number of sequences of each dataset that matrix_entropy, and what needs spectra in smoothing.csv, was measured
    on; the largest number of any layer."""
    complete: bool = True
    """False for a scan that was interrupted."""
    batch_size: int | None = None
    """Sequences per forward pass at the end of the scan; smaller than asked for where memory ran out."""
    sequences_done: int = 0
    """Number of sequences measured, over all datasets."""
    timing: Timing = Timing()
    """How long the scan took."""
    tables: dict[str, TableFacts] = Field(default_factory=dict)
    """The tables of the run folder, by name."""
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of every other file of the run folder, by name; empty for runs written before there were any."""

    def decides(self) -> dict[str, Any]:
        """Everything that decides the numbers; a scan resumes from the shards of another only where this is equal."""
        facts = self.model_dump(mode="json", by_alias=True, include=DECIDING)
        del facts["model"]["name"]  # a scan may go on under another name
        return {"request": self.request.part("text", "columns", "rounding")} | facts


HASHES = ("weights_sha256", "tensors_sha256")
"""The fields of the model that tell its weights from others: of files, or of a model object."""

DECIDING = {
    "schema_version", "sinkscope", "versions", "model", "data", "first_token", "decoder_input", "tensor_parallel",
    "attention", "metrics", "keywords",
}  # fmt: skip
"""Fields of the manifest that decide numbers, in addition to the request."""

"""summary.json: the answer of a run for each stream, in numbers and in sentences."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sinkscope.runs.schema.base import Number, Record
from sinkscope.runs.schema.manifest import FirstToken
from sinkscope.runs.schema.stream import MixedHead, StreamSummary

SCHEMA_VERSION = 3


class DomainSummary(Record):
    """The answer for one dataset."""

    streams: dict[str, StreamSummary]
    """The answer for each stream."""


class HeadContrast(Record):
    """A head whose BOS mass differs between two datasets."""

    stream: str
    """Stream of the head."""
    layer: int
    """Layer of the head."""
    head: int
    """Number of the head in its layer."""
    difference: Number
    """BOS mass in the second dataset minus that in the first."""
    low: Number
    """Lower end of the 95 % interval (Student's t)."""
    high: Number
    """Upper end of the 95 % interval (Student's t)."""
    q: Number
    """Benjamini-Hochberg false discovery rate over all heads of the pair."""


class DomainContrast(Record):
    """The comparison of two datasets."""

    a: str
    """The first dataset."""
    b: str
    """The second dataset."""
    paired: bool
    """Whether both read the same documents, one by one, so that each sequence is its own control."""
    metric: str
    """The metric that is compared."""
    heads_tested: int
    """Number of heads that have a p-value."""
    heads_that_differ: int
    """Number of heads with q below the false discovery rate."""
    false_discovery_rate: float
    """The bound on q."""
    heads: list[HeadContrast]
    """The heads that differ, the largest difference first."""


class Published(Record):
    """A published number of this model, to compare the run with."""

    model: str
    """The model's name in the paper."""
    metric: str
    """The metric that was measured."""
    value: float
    """The number."""
    unit: str
    """Unit of the number."""
    text: str
    """The text it was measured on."""
    setting: str
    """Lengths, thresholds and the like."""
    source: str
    """The paper."""
    not_comparable: str | None = None
    """Why no column of a scan is measured alike; null where one is, and for runs of an older sinkscope."""


class ImageTokens(Record):
    """The attention of text heads on the tokens of a picture."""

    id: int | None
    """Id of the image token."""
    positions: tuple[int, int]
    """First and last position of image tokens."""
    count: int
    """Number of image tokens in a sequence."""
    uniform: Number
    """Mass that uniform causal attention, within each layer's window, puts on image tokens; null where attention is not
    causal."""
    mean_mass: Number
    """Mass on image tokens, mean over queries and heads."""
    heads: list[tuple[int, int, float]]
    """[layer, head, mass] of each text head."""


class Summary(Record):
    """The answer of a run."""

    schema_version: int = SCHEMA_VERSION
    """Version of this format."""
    model: str
    """The model."""
    complete: bool
    """False for a scan that was interrupted."""
    data: list[str]
    """Names of the datasets."""
    sequences: int
    """Number of sequences measured, over all datasets."""
    epsilon: float
    """A head has a sink where alpha_0 exceeds this."""
    first_token: FirstToken
    """The first token of the sequences."""
    streams: dict[str, StreamSummary]
    """The answer for each stream, over all datasets."""
    domains: dict[str, DomainSummary] = Field(default_factory=dict)
    """The answer for each dataset; empty where there is only one."""
    dormant_in_some_domains: list[MixedHead] = Field(default_factory=list)
    """Heads that are dormant in some datasets and not in others."""
    domains_compared: list[DomainContrast] = Field(default_factory=list)
    """The comparison of each pair of datasets."""
    published: list[Published] = Field(default_factory=list)
    """Published numbers of this model."""
    not_softmax: list[str] = Field(default_factory=list)
    """Layers without softmax attention."""
    joined_sequences: int = 0
    """Number of sequences made of several documents."""
    warnings: list[str] = Field(default_factory=list)
    """Sentences that the reader must know."""
    task: dict[str, Any] | None = None
    """What the model's own task says about its sinks."""
    image_tokens: ImageTokens | None = None
    """The attention of text heads on the tokens of pictures."""
    more: dict[str, Any] = Field(default_factory=dict)
    """Entries of an input kind that does not come with sinkscope."""

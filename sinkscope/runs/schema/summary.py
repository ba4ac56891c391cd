"""summary.json: the answer, per stream, with the baseline of uniform attention beside it and the answer in words."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sinkscope.runs.schema.base import Number, Record
from sinkscope.runs.schema.manifest import FirstToken
from sinkscope.runs.schema.stream import MixedHead, StreamSummary

SCHEMA_VERSION = 2


class DomainSummary(Record):
    """One domain by itself."""

    streams: dict[str, StreamSummary]
    """By stream."""


class HeadContrast(Record):
    """A head whose BOS mass differs between two domains."""

    stream: str
    """Its stream."""
    layer: int
    """Its layer."""
    head: int
    """Its number in the layer."""
    difference: Number
    """BOS mass in the second domain minus that in the first."""
    low: Number
    """Lower end of the 95 % bootstrap interval."""
    high: Number
    """Upper end of it."""
    q: Number
    """Benjamini-Hochberg false discovery rate over all heads of the pair."""


class DomainContrast(Record):
    """Two domains against each other."""

    a: str
    """The first domain."""
    b: str
    """The second domain."""
    paired: bool
    """Whether both hold the same documents, so that each sequence is its own control."""
    metric: str
    """What is compared."""
    heads_tested: int
    """Heads that have a p-value."""
    heads_that_differ: int
    """Heads with q below the false discovery rate and an interval without 0."""
    false_discovery_rate: float
    """The rate."""
    heads: list[HeadContrast]
    """The heads that differ, the largest difference first."""


class Published(Record):
    """A published number of this model, to stand beside the run's own."""

    model: str
    """The model's name in the paper."""
    metric: str
    """What was measured."""
    value: float
    """The number."""
    unit: str
    """Its unit."""
    text: str
    """The text it was measured on."""
    setting: str
    """Lengths, thresholds and the like."""
    source: str
    """The paper."""


class ImageTokens(Record):
    """Attention that text heads pay to the tokens of a picture."""

    id: int | None
    """Id of the image token."""
    positions: tuple[int, int]
    """First and last position of image tokens."""
    count: int
    """Number of image tokens in a sequence."""
    uniform: Number
    """Mass that a causal head gives them which attends to all keys alike; null where attention is not causal."""
    mean_mass: Number
    """Mass on them, mean over queries and heads."""
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
    """The domains."""
    sequences: int
    """Sequences measured, over all domains."""
    epsilon: float
    """A head has a sink where alpha_0 exceeds this."""
    first_token: FirstToken
    """The first token of the sequences."""
    streams: dict[str, StreamSummary]
    """Over all domains, by stream."""
    domains: dict[str, DomainSummary] = Field(default_factory=dict)
    """Each domain by itself; empty where there is one."""
    dormant_in_some_domains: list[MixedHead] = Field(default_factory=list)
    """Heads that are dormant in some domains and not in others."""
    domains_compared: list[DomainContrast] = Field(default_factory=list)
    """Each pair of domains."""
    published: list[Published] = Field(default_factory=list)
    """Published numbers of this model."""
    not_softmax: list[str] = Field(default_factory=list)
    """Layers without softmax attention."""
    joined_sequences: int = 0
    """Sequences made of several documents."""
    warnings: list[str] = Field(default_factory=list)
    """What the reader must know."""
    task: dict[str, Any] | None = None
    """What a model's own task says of its sinks."""
    image_tokens: ImageTokens | None = None
    """Attention on the tokens of pictures."""
    more: dict[str, Any] = Field(default_factory=dict)
    """Entries of a kind of input that does not come with sinkscope."""

"""The part of summary.json on one stream of attention, and the records it consists of."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sinkscope.runs.schema.base import Number, Record

Head = tuple[int, int]
"""(layer, head) in one stream."""


class PrefixValues(Record):
    """A number over whole sequences and over their first 64 queries."""

    T: Number
    """The number over whole sequences."""
    t64: Number
    """The number over the first 64 queries of the same pass; null where sequences are shorter."""


class Average(Record):
    """A mean over all heads and sequences."""

    mean: Number
    """The mean."""
    sem: Number
    """Standard error of the mean, from the means of the sequences. Sequences of several datasets over the same document
    count as one cluster."""


class TopPosition(Record):
    """A key position that receives much attention."""

    position: int
    """The key position k."""
    token: str | None
    """The token that all sequences have there; null where they differ."""
    mean_alpha: Number
    """Mean over heads of alpha_k, which is a mean over the sequences that reach k."""
    heads_over_epsilon: int
    """Number of heads whose mean alpha_k exceeds epsilon."""


class DormantHeads(Record):
    """The heads that are dormant in every dataset."""

    rule: str
    """The dormant rule: NAME<x or NAME>x, applied to the mean of a column of heads.csv."""
    count: int
    """Number of dormant heads."""
    heads: list[Head]
    """[layer, head] of each dormant head."""
    in_some_domains: int = 0
    """Number of heads that are dormant in some datasets and not in others."""
    unknown: int = 0
    """Number of other heads in which the rule's column is missing, in one dataset or more."""


class DormancyScores(Record):
    """How far the published dormancy scores agree: each selects the tenth of the heads that it ranks most dormant."""

    fraction: float
    """Share of the heads that each score selects."""
    count: int
    """Number of heads that each score selects: `fraction` of the heads, rounded to the nearest whole number, halves
    up, and 1 at least."""
    most_dormant: dict[str, list[Head]]
    """[layer, head] of the selected heads, by score: those with the lowest or the highest mean, over sequences and then
    over datasets; in a tie the first ones. A score that is the same in all heads ranks nothing and is left out."""
    overlap: dict[str, dict[str, Number]]
    """Intersection over union of each pair of scores."""


class FirstTokenNorm(Record):
    """Where the first token's norm in the residual stream jumps and falls."""

    spike_layer: int | None
    """The layer that raises the norm, a mean over sequences, most, if by a factor of 5 or more."""
    fall_layer: int | None
    """The later layer that lowers the norm most, if by a factor of 5 or more."""
    max_ratio: Number
    """norm_ratio of the layer in which it is largest: norm x_0 over the mean norm of the other tokens, mean over
    sequences."""


class SinkToken(Record):
    """A token, or a region of positions that hold no tokens, that is a sink beyond the first position."""

    kind: str
    """attention or state."""
    token: str | None
    """The token; null where the positions hold no tokens."""
    id: int | None
    """Id of the token; null where the positions hold no tokens."""
    region: str
    """special, text, image, class, register, patch, ..."""
    occurrences: int
    """How often it occurs beyond the first position (for the kind attention: where enough query rows see it)."""
    sinks: int
    """How many of these occurrences are sinks."""
    heads: int | None
    """Number of heads in which it is a sink; null for the kind state."""


class SinksBeyondFirst(Record):
    """The sinks beyond the first position."""

    tokens: list[SinkToken]
    """The tokens with the most attention on them as sinks, most first; where there are none, those of the kind
    state."""
    others: int
    """Number of further tokens of the same kind in tokens.csv."""
    created: int | None
    """The first layer in which one of these tokens or of the others is a sink; null where there are none."""
    gone: int | None
    """The first layer from which on none of all these tokens is a sink; null where there are none, or where one still
    is in the last layer."""


class ChannelPosition(Record):
    """A position at which a channel holds massive elements."""

    position: int
    """The token position."""
    token: str | None
    """The token that all sequences have there; null where they differ."""
    percent: Number
    """Percentage of (layer, sequence) pairs that have a massive element of the channel there, over its `layers`."""


class MassiveChannel(Record):
    """A channel of the residual stream that holds massive elements."""

    channel: int
    """The channel."""
    layers: list[int]
    """Layers in which the channel holds massive elements."""
    tokens_per_sequence: Number
    """Number of massive elements of the channel in a sequence, mean over sequences and over those layers."""
    positions: list[ChannelPosition]
    """The positions that hold massive elements most often."""


class MassiveActivations(Record):
    """The massive activations of the run (Sun et al. 2402.17762), and the largest of them."""

    present: bool | None
    """Whether an element exceeds 100 and 1000 times its layer's median; null where the residual stream was not seen."""
    layers: list[int]
    """Layers whose input holds massive activations."""
    max_abs: Number
    """Largest absolute value of a massive element; of any element where none is massive."""
    layer: int | None = None
    """Layer whose input holds that element."""
    position: int | None = None
    """Token position of that element."""
    token: str | None = None
    """The token that all sequences have there; null where they differ."""
    channel: int | None = None
    """Channel of that element."""
    over_token_median: Number = None
    """max_abs over the median of its token's elements."""
    over_layer_median: Number = None
    """max_abs over the median of its layer's elements."""
    channels: list[MassiveChannel] = Field(default_factory=list)
    """The channels that hold massive elements, those with most elements first."""


class Windows(Record):
    """Layers whose later queries cannot reach the first token."""

    layers_out_of_reach: list[int]
    """Layers whose window is shorter than the sequence."""


class StreamSummary(Record):
    """One stream of attention: text, vision, audio, encoder, decoder or cross."""

    layers: int
    """Number of attention calls of the stream."""
    heads: int
    """Number of query heads over all layers."""
    sequences: int
    """Number of sequences measured."""
    tokens_per_sequence: int
    """Number of queries of the longest sequence."""
    causal: bool
    """Whether no query sees a later key in any layer."""
    sink_rate_percent: dict[str, PrefixValues]
    """By threshold: 100 x the mean over sequences, layers and heads of 1[alpha_0 > threshold]. It says nothing about
    sinks where uniform_alpha_0 is above the threshold too."""
    uniform_alpha_0: PrefixValues
    """alpha_0 of heads that attend alike to all keys they may see, mean over sequences, layers and heads: the baseline
    of every sink score. H_T / T under causal attention, 1 / keys where every query sees all keys."""
    uniform_rate_percent: dict[str, PrefixValues] = Field(default_factory=dict)
    """sink_rate_percent of heads that attend alike to all keys they may see: above 0 where some sequences are so short
    that uniform attention exceeds the threshold in them. Empty in runs of sinkscope 0.1."""
    bos_mass: Average
    """Mean attention on the first token."""
    sink_score: Average
    """Mean alpha_0."""
    entropy: Average
    """Mean entropy of a query's attention, nats."""
    first_argmax: Average
    """Mean share of queries whose largest weight is on the first token."""
    sink_heads: int
    """Number of heads whose mean alpha_0 exceeds epsilon."""
    top_positions: list[TopPosition]
    """The five key positions with the largest mean alpha_k, among the keys k with n_k >= n_max/4 in every head (in some
    sequence of each dataset) and n_k > 0 in all sequences that reach k. Empty where there are none."""
    dormant: DormantHeads
    """Heads that are dormant by the dormant rule."""
    dormancy_scores: DormancyScores
    """Agreement of the published dormancy scores."""
    first_token_norm: FirstTokenNorm
    """Where the first token's norm jumps and falls."""
    massive_activations: MassiveActivations
    """The largest activations of the residual stream."""
    windows: Windows
    """Layers that cannot reach the first token."""
    smoothing: dict[str, int] | None = None
    """Number of heads by smoothing verdict; null where smoothing was not asked for."""
    ranks_missing: dict[str, int] = Field(default_factory=dict)
    """Number of heads without a value, by column of smoothing.csv (rank_w, rank_qk) that some head lacks."""
    sinks_beyond_first: SinksBeyondFirst | None = None
    """The sinks beyond the first position; null for runs of an older sinkscope, where no key beyond the first is seen
    by enough queries, and where attention is no softmax."""
    measured: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What each other measurement made on request found, by its name."""
    in_words: list[str] = Field(default_factory=list)
    """The answer in sentences."""


class MixedHead(Record):
    """A head that is dormant in some datasets and not in others."""

    stream: str
    """Stream of the head."""
    layer: int
    """Layer of the head."""
    head: int
    """Number of the head in its layer."""
    dormant_in: list[str]
    """Domains in which the head is dormant."""
    active_in: list[str]
    """Domains in which the head is not dormant."""

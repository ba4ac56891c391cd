"""What manifest.json records of one attention call of the model."""

from __future__ import annotations

from sinkscope.runs.schema.base import Record


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

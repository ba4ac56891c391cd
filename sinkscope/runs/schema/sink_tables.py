"""The columns of sinks.parquet and tokens.csv, each with its definition. The catalogue lists them from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SinkColumn:
    """One column. `type`: as in the schema of tables. `formula`: how it is computed."""

    name: str
    type: str
    unit: str
    range: str
    formula: str


def _key(name: str, type: str, formula: str) -> SinkColumn:
    return SinkColumn(name, type, "", "", formula)


STREAM = _key("stream", "string", "text, vision, audio, encoder, decoder or cross.")
ID = _key("id", "integer", "Id of the token there; empty where the positions hold no tokens (patches, frames).")
TOKEN = _key("token", "string", "The token there, as the vocabulary spells it; empty where the positions hold none.")
REGION = _key(
    "region", "string",
    "What stands there: special (a special token of the tokenizer), text, image (an image token in a text); in "
    "conversations whose words it is (user, assistant, ...), markers or generated; in "
    "pictures and sound class, distillation, register, patch, frame; position where none of these is known.",
)  # fmt: skip
KIND = _key("kind", "string", "attention, state or massive: how it is a sink; `sinkscope metrics` defines each.")

SINK_COLUMNS = (
    _key("domain", "string", "The domain."),
    _key("sequence", "integer", "Number of the sequence in its domain."),
    _key("position", "integer", "The key position k of the sink."),
    ID, TOKEN, REGION, STREAM,
    _key("layer", "integer", "Number of the layer in its stream."),
    _key("head", "integer", "Number of the query head; empty for the kinds state and massive, which no head has."),
    KIND,
    SinkColumn(
        "alpha", "number", "probability", "[0, 1]",
        "alpha_k in this head and sequence; empty for the kinds state and massive.",
    ),
    SinkColumn(
        "cos_first", "number", "cosine", "[-1, 1]",
        "cos(x_k, x_0); x is the residual stream that enters the layer. Empty in cross-attention, and where x was not "
        "seen.",
    ),
    SinkColumn("max_abs", "number", "activation", "[0, inf)", "Largest abs of an element of x_k; empty as cos_first."),
    SinkColumn(
        "norm_ratio", "number", "ratio", "[0, inf)",
        "Norm x_k over the median norm of the sequence's tokens; empty as cos_first.",
    ),
)  # fmt: skip
"""sinks.parquet: one row for every sink of every sequence, head (or none) and layer. Numbers are float32."""

TOKEN_COLUMNS = (
    STREAM, KIND, TOKEN, ID, REGION,
    _key("first", "boolean", "Whether these are the occurrences at position 0; all others have a row of their own."),
    SinkColumn(
        "occurrences", "integer", "tokens", "[1, inf)",
        "How often the token occurs; for the kind attention, at keys k with n_k >= max(16, n_max/16) in some head of "
        "the stream.",
    ),
    SinkColumn("sinks", "integer", "tokens", "[1, inf)", "Number of occurrences that are a sink in some layer."),
    SinkColumn("rate", "number", "share", "[0, 1]", "sinks / occurrences."),
    SinkColumn(
        "heads", "integer", "heads", "[1, H]",
        "Number of (layer, head) in which some occurrence is a sink; empty for the kinds state and massive.",
    ),
    SinkColumn("sequences", "integer", "sequences", "[1, inf)", "Number of sequences that hold such a sink."),
    SinkColumn("first_layer", "integer", "layer", "[0, inf)", "The first layer in which some occurrence is a sink."),
    SinkColumn("last_layer", "integer", "layer", "[0, inf)", "The last layer in which some occurrence is a sink."),
    SinkColumn(
        "lifetime", "number", "layers", "[1, inf)",
        "Number of layers in which an occurrence is a sink, mean over the occurrences that are one in some layer.",
    ),
    SinkColumn(
        "mean_alpha", "number", "probability", "[0, 1]",
        "Mean alpha_k of these sinks over heads and sequences; empty for the kinds state and massive.",
    ),
    SinkColumn(
        "sink_share", "number", "share", "[0, 1]",
        "Sum of alpha_k over these sinks, over the same sum of all attention sinks of the stream; empty for the kinds "
        "state and massive.",
    ),
)  # fmt: skip
"""tokens.csv: one row a (stream, kind, token or region, first or not) that is a sink somewhere."""

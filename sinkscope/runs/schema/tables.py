"""The tables of every run folder: what one row stands for, and the type, unit and meaning of every column."""

from __future__ import annotations

from sinkscope.runs.schema.table import (
    DOCUMENT,
    DOMAIN,
    HEAD,
    KIND,
    LAYER,
    MODULE,
    SEQUENCE,
    STREAM,
    ColumnSchema,
    TableSchema,
    key,
    number,
    with_sem,
)

STREAM_OF_SINK = key("stream", "string", "text, vision, audio, encoder, decoder or cross.")
ID = key("id", "integer", "Id of the token. Empty where positions hold no tokens, but patches or frames.")
TOKEN = key("token", "string", "The token, as the vocabulary spells it. Empty where positions hold no tokens.")
REGION = key(
    "region", "string",
    "What kind of position it is. In texts: special (a special token of the tokenizer), text, or image (an image "
    "token). In conversations: the speaker (user, assistant, ...), markers, generated, or unknown (a token of which "
    "the chat template does not tell whose it is). In pictures and sound: class, distillation, register, detection, "
    "patch or frame. position where none of these is known.",
)  # fmt: skip
KIND_OF_SINK = key("kind", "string", "Kind of the sink: attention, state or massive. `sinkscope metrics` defines each.")

SINK_COLUMNS = (
    key("domain", "string", "The dataset."),
    key("sequence", "integer", "Number of the sequence in its dataset."),
    key("position", "integer", "The key position k of the sink."),
    ID, TOKEN, REGION, STREAM_OF_SINK,
    key("layer", "integer", "Number of the layer in its stream."),
    key("head", "integer", "Number of the query head in its layer. Empty for the kinds state and massive, which are "
        "of no head."),
    KIND_OF_SINK,
    number(
        "alpha", "probability", "[0, 1]",
        "alpha_k in this head and sequence. Empty for the kinds state and massive.",
    ),
    number(
        "cos_first", "cosine", "[-1, 1]",
        "cos(x_k, x_0). Empty in cross-attention, and where x was not seen.",
    ),
    number("max_abs", "activation", "[0, inf)", "Largest absolute value of the elements of x_k. Empty "
        "where cos_first is empty."),
    number(
        "norm_ratio", "ratio", "[0, inf)",
        "norm x_k divided by the median of norm x_j over the sequence's tokens j. Empty where cos_first is empty.",
    ),
)  # fmt: skip
"""sinks.parquet: one row for every sink of every sequence, head (or none) and layer. Numbers are float32."""

TOKEN_COLUMNS = (
    STREAM_OF_SINK, KIND_OF_SINK, TOKEN, ID, REGION,
    key("first", "boolean", "true: the row counts occurrences at position 0 alone. false: it counts all others."),
    ColumnSchema(
        "occurrences", "integer", "tokens", "[1, inf)",
        "How often the token occurs in its region, at position 0 or after it. For the kind attention, only keys k that "
        "enough queries see count, n_k >= max(16, n_max/16) in some head of the stream.",
    ),
    ColumnSchema(
        "sinks", "integer", "tokens", "[1, inf)", "Number of these occurrences that are a sink in some layer."
    ),
    number("rate", "share", "[0, 1]", "sinks / occurrences."),
    ColumnSchema(
        "heads", "integer", "heads", "[1, inf)",
        "Number of heads, over all layers, in which some occurrence is a sink. Empty for the kinds state and massive.",
    ),
    ColumnSchema("sequences", "integer", "sequences", "[1, inf)", "Number of sequences in which some occurrence is a "
        "sink."),
    ColumnSchema("first_layer", "integer", "layer", "[0, inf)", "The first layer in which some occurrence is a sink."),
    ColumnSchema("last_layer", "integer", "layer", "[0, inf)", "The last layer in which some occurrence is a sink."),
    number(
        "lifetime", "layers", "[1, inf)",
        "Number of layers in which an occurrence is a sink: mean over the occurrences that are a sink in some layer.",
    ),
    number(
        "mean_alpha", "probability", "[0, 1]",
        "Mean alpha_k over the token's rows of sinks.parquet. Empty for the kinds state and massive.",
    ),
    number(
        "sink_share", "share", "[0, 1]",
        "Sum of alpha_k over the token's rows of sinks.parquet, divided by the sum over all attention sinks of the "
        "stream. Empty for the kinds state and massive.",
    ),
)  # fmt: skip
"""tokens.csv: one row a (stream, kind, token or region, first or not) that is a sink somewhere."""


# The tables of every run folder: what one row stands for, and the type, unit and meaning of every column.


def _of_stretch(name: str, unit: str, what: str) -> tuple[ColumnSchema, ...]:
    """The columns that a stretch has for a column of positions.parquet."""
    return (
        number(name, unit, "[0, 1]", f"Mean {what} in the stretch, over positions and sequences."),
        number(f"{name}_max", unit, "[0, 1]", f"Largest {what} in the stretch, of any one sequence."),
        key(f"{name}_max_position", "integer", f"The position that has {name}_max."),
    )


BOS_MASS = number("bos_mass", "probability", "[0, 1]", "bos_mass over the first `length` queries.")
SINK_SCORE = number("sink_score", "probability", "[0, 1]", "sink_score over the first `length` queries.")
SINK_RATE = number(
    "sink_rate", "share", "[0, 1]", "Share of sequences with sink_score > epsilon over the first `length` queries."
)

TABLES = {
    table.name: table
    for table in (
        TableSchema(
            "heads", "heads.csv", "one (stream, layer, head) of a domain",
            (DOMAIN, STREAM, LAYER, HEAD, key("kv_group", "integer", "Key/value group of the head."), MODULE, KIND),
            measured=("heads",),
        ),
        TableSchema(
            "layers", "layers.csv", "one (stream, layer) of a domain",
            (DOMAIN, STREAM, LAYER, MODULE, KIND, key("heads", "integer", "Query heads of the layer.")),
            measured=("layers",),
        ),
        TableSchema(
            "length_curve", "length_curve.csv", "one (stream, layer, head, prefix length)",
            (DOMAIN, STREAM, LAYER, HEAD, key("length", "integer", "Number of queries of the prefix: 64, 128, ... and "
                "the layer's own T.")),
            own=with_sem(BOS_MASS, SINK_SCORE, SINK_RATE),
        ),
        TableSchema(
            "positions", "positions.parquet", "one (stream, layer, head, position < 4,096)",
            (DOMAIN, STREAM, LAYER, HEAD, key("position", "integer", "The position, as a key and as a query.")),
            own=(
                number("alpha", "probability", "[0, 1]", "Mean alpha_k of the key k at the position, over the "
                    "sequences in which some query may see it. Empty where there is none."),
                number("alpha_t64", "probability", "[0, 1]", "The same over the first 64 queries only, k < 64."),
                number("bos_mass", "probability", "[0, 1]", "Mean A[i,0] of the query i at the position."),
                number("bos_share", "share", "[0, 1]", "Mean |A[i,0]| / sum_j |A[i,j]| of the query i at the "
                    "position."),
                key("token", "string", "The token at the position, where all sequences of the dataset have the same "
                    "one."),
            ),
        ),
        TableSchema(
            "stretches", "stretches.parquet", "one (layer, head, stretch) from 4,096 on",
            (
                DOMAIN, STREAM, LAYER, HEAD,
                key("first", "integer", "First position. There are 64 stretches of equal length from each power of two "
                    "to the next."),
                key("last", "integer", "Last position."),
            ),
            own=(
                *_of_stretch("alpha", "probability", "alpha_k of the keys k"),
                *_of_stretch("bos_mass", "probability", "A[i,0] of the queries i"),
                *_of_stretch("bos_share", "share", "|A[i,0]| / sum_j |A[i,j]| of the queries i"),
            ),
        ),
        TableSchema(
            "sequences", "sequences.parquet",
            "one (stream, layer, head or none, sequence)",
            (key("domain", "string", "The dataset."), STREAM, LAYER, MODULE, SEQUENCE, DOCUMENT, HEAD),
        ),
        TableSchema(
            "sinks", "sinks.parquet", "a sink: (sequence, layer, head or none, position)",
            SINK_COLUMNS,
        ),
        TableSchema(
            "tokens", "tokens.csv", "one (stream, kind, token, region, first or not)",
            (DOMAIN, *TOKEN_COLUMNS),
        ),
        TableSchema(
            "domains", "domains.csv", "one (pair of datasets, stream, layer, head)",
            (
                key("domain_a", "string", "The first dataset."), key("domain_b", "string", "The second dataset."),
                key("paired", "boolean", "Whether both datasets read the same documents in the same order."),
                STREAM, LAYER, HEAD, MODULE,
            ),
            own=(
                number("bos_mass_a", "probability", "[0, 1]", "Mean bos_mass in the first dataset."),
                number("bos_mass_b", "probability", "[0, 1]", "Mean bos_mass in the second dataset."),
                number("difference", "probability", "[-1, 1]", "bos_mass_b - bos_mass_a."),
                number("sem", "probability", "[0, inf)", "Standard error of the difference."),
                number("low", "probability", "(-inf, inf)", "Lower end of the 95 % interval (Student's t)."),
                number("high", "probability", "(-inf, inf)", "Upper end of the 95 % interval (Student's t)."),
                number("p", "probability", "[0, 1]", "p of the two-sided t-test that the difference is 0."),
                number("q", "probability", "[0, 1]", "p adjusted by Benjamini-Hochberg over all heads of the pair."),
                key("differs", "boolean", "q < 0.05; empty where there is no p."),
            ),
        ),
    )
}  # fmt: skip
"""The tables of every run folder, by name; `runs.questions` has those that a scan writes on request."""

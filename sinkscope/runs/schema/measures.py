"""The measurements that a scan makes on request (`--measure NAME`): their names and the tables that each writes.

To add one, add its entry to MEASURES. `sinkscope/engine/measures/NAME.py` then says what it measures, and
`sinkscope/runs/NAME.py` declares those columns of its tables that have one value for the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.schema.tables import (
    DOMAIN,
    HEAD,
    LAYER,
    MODULE,
    STREAM,
    ColumnSchema,
    TableSchema,
    key,
    number,
    with_sem,
)

ALL = "all"
LENGTH = ColumnSchema("length", "integer", "", "", "Tokens of the prefix.")
TOKEN_ID = key("token_id", "integer", "Id of the token; of a position's kind where there are none.")
TOKEN = key("token", "string", "The token as the vocabulary spells it.")
POSITION = key("position", "integer", "Position of the token.")


@dataclass(frozen=True)
class Measure:
    """A measurement on request.

    Attributes:
        what: what it tells, as a question.
        tables: the tables that it adds to a run folder.
        notation: what the formulas of its columns have in common.
    """

    name: str
    what: str
    tables: tuple[TableSchema, ...]
    notation: str = ""


def _evidence(name: str, what: str) -> tuple[ColumnSchema, ...]:
    """A mean alpha with its error and the share of sequences in which it exceeds epsilon."""
    return (
        *with_sem(number(name, "probability", "[0, 1]", what)),
        number(f"{name}_rate", "share", "[0, 1]", f"Share of sequences whose {name} exceeds epsilon."),
    )


FIRST_COLUMNS = (
    *_evidence("alpha_0_bos_first", "Mean alpha_0 over the sequences that begin with BOS."),
    *_evidence("alpha_0_other_first", "Mean alpha_0 over the sequences that hold no BOS."),
    *_evidence("alpha_bos_later", "Mean alpha_k at BOS's place k over the sequences in which k > 0."),
    *_evidence("alpha_0_bos_later", "Mean alpha_0 over the sequences in which BOS stands at a later position."),
    key(
        "verdict", "string", "token: alpha_bos_later > epsilon, the sink follows BOS. position: alpha_0_other_first > "
        "epsilon, it is at position 0 whatever stands there. both, none. Empty where one of them was not measured.",
    ),
)  # fmt: skip

REGION_COLUMNS = (
    key("sequences", "integer", "Sequences that have queries i >= 1 in the region; the means are over these."),
    key("queries", "integer", "Queries i >= 1 of the region, over all sequences."),
    *with_sem(
        number("bos_mass", "probability", "[0, 1]", "Mean A[i,0] over the queries of the region."),
        number("self_mass", "probability", "[0, 1]", "Mean A[i,i] over the queries of the region."),
        number("marker_mass", "probability", "[0, 1]", "Mean attention of these queries on the template's markers, BOS "
               "among them."),
        number("entropy", "nats", "[0, log T]", "Mean entropy of the attention of these queries."),
    ),
)  # fmt: skip

MEASURES = {
    each.name: each
    for each in (
        Measure(
            "smoothing", "does each head make tokens more similar?",
            (TableSchema(
                "smoothing", "smoothing.csv", "one (stream, layer, head); --measure smoothing",
                (DOMAIN, STREAM, LAYER, HEAD, MODULE), measured=("smoothing",),
            ),),
            "W = W_O^h W_V^h diag(gain of the input norm). x_i is the residual stream entering the block, z_i the "
            "normalised token without the norm's gain and bias (x_i itself where there is no norm). Only tokens i, j "
            ">= 1 count; zbar is the mean of their z_i, B = Cov(z) with 1/n. Biases are left out, and any norm or "
            "multiplier after W_O.",
        ),
        Measure(
            "switch", "is a sink a switch that turns its head off?",
            (
                TableSchema(
                    "switch", "switch.csv", "one (stream, layer, head); --measure switch",
                    (DOMAIN, STREAM, LAYER, HEAD, MODULE), measured=("switch",),
                ),
                TableSchema(
                    "switch_tokens", "switch_tokens.csv", "one (layer, head, token); --measure switch",
                    (DOMAIN, STREAM, LAYER, HEAD, MODULE, TOKEN_ID, TOKEN), measured=("switch_tokens",),
                ),
                TableSchema(
                    "alignment", "alignment.parquet", "one (layer, position); --measure switch",
                    (DOMAIN, STREAM, LAYER, MODULE, POSITION), measured=("alignment",),
                ),
            ),
            "o_i is the head's output before W_O, i >= 1. m is the mean over j >= 1 of norm(W_O^h v_j). Row i is off "
            "where norm(W_O^h o_i) < 0.1 m, and sunk where A[i,0] >= 0.9.",
        ),
        Measure(
            "modules", "what do the inputs of linear modules lose in 8 bits?",
            (TableSchema(
                "modules", "modules.csv", "one linear module; --measure modules",
                (
                    DOMAIN, STREAM, LAYER,
                    ColumnSchema("module", "string", "", "", "Path of the linear module; path[n] for its n-th call."),
                ),
                measured=("modules",),
            ),),
            "x is an entry of the module's input. Nothing is quantised; symmetric round-to-nearest with 127 levels is "
            "meant. Entries that are 0 before are left out. Stream and layer are empty outside the blocks.",
        ),
        Measure(
            "spikes", "who writes the massive activations?",
            (TableSchema(
                "spikes", "spikes.csv", "one (block, part, channel); --measure spikes",
                (
                    DOMAIN, STREAM, LAYER, ColumnSchema("module", "string", "", "", "Path of the block."),
                    ColumnSchema("part", "string", "", "", "What writes: attention or mlp."),
                    ColumnSchema("channel", "integer", "", "", "A channel that holds massive elements; at most eight."),
                    ColumnSchema("position", "integer", "", "", "The spike's token in most sequences."),
                ),
                measured=("spikes",),
            ),),
            "The spike's token is the position where the residual stream, entering any block, has the sequence's "
            "largest absolute value. Every number is read there. Attention and MLP are told apart in blocks that add "
            "both to the residual stream; other blocks (BERT's, which normalise it) have no rows.",
        ),
        Measure(
            "streaming", "what may the KV cache forget?",
            (TableSchema(
                "streaming", "streaming.csv", "one (stream, layer, head); --measure streaming",
                (DOMAIN, STREAM, LAYER, HEAD, MODULE), measured=("streaming",),
            ),),
            "A cache keeps the first S keys (--sinks) and the last W (--window), query i's own among them; the keys S "
            ".. i - W are distant. Every column is empty where a sequence has no distant key (T <= S + W) or a query "
            "sees later keys, since nothing is cached then.",
        ),
        Measure(
            "first", "does the sink follow BOS or the first position (with --first, --prepend)?",
            (TableSchema(
                "first", "first.csv", "one (stream, layer, head); --first, --prepend",
                (STREAM, LAYER, HEAD, MODULE), own=FIRST_COLUMNS,
            ),),
        ),
        Measure(
            "regions", "how do heads attend from each speaker's words (in chats)?",
            (TableSchema(
                "regions", "regions.csv", "one (stream, layer, head, region); chats",
                (DOMAIN, STREAM, LAYER, HEAD, key("region", "string", "Whose words the queries are, or markers.")),
                own=REGION_COLUMNS,
            ),),
        ),
        Measure(
            "cosines", "how alike are the tokens of each prefix?",
            (TableSchema(
                "cosine_curve", "cosine_curve.csv", "one (stream, layer, length); --measure cosines",
                (DOMAIN, STREAM, LAYER, MODULE, LENGTH), measured=("cosine_curve",),
            ),),
            "x is the residual stream entering the block, z what the q/k/v projections read. All prefixes (--lengths) "
            "come from one pass: in a causal model they equal runs at that length.",
        ),
    )
}  # fmt: skip
"""Every measurement, by name, in the order in which they are made and named."""

MEASURED_TABLES = {table.name: table for measure in MEASURES.values() for table in measure.tables}
"""The tables of all measurements, by name."""


def asked_measures(names: str | Sequence[str]) -> tuple[str, ...]:
    """The measurements asked for, in the order of MEASURES, each once; `all` stands for every one.

    Raises SinkscopeError for a name that is no measurement.
    """
    asked = {names} if isinstance(names, str) else {*names}
    unknown = sorted(map(str, asked - MEASURES.keys() - {ALL}))
    if unknown:
        known = [*MEASURES, ALL]
        raise SinkscopeError(f"--measure {unknown[0]!r}: one of {', '.join(known)}{did_you_mean(unknown[0], known)}")
    return tuple(name for name in MEASURES if name in asked or ALL in asked)

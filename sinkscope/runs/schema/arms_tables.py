"""The tables of arms: what `sinkscope arms`, `evict`, `quant` and `ablate` write beside their JSON."""

from __future__ import annotations

from sinkscope.runs.schema.tables import ColumnSchema, TableSchema

NATS = "nats a token"
ARM = ColumnSchema("arm", "string", "", "", "The arm, in the grammar that docs/commands/arms.md lists.")

NUMBERS = {
    "loss": (
        NATS, "[0, inf)",
        "Next-token cross-entropy of the text: mean over positions 1..T-1 (predicted from 0..T-2), then sequences.",
    ),
    "kl": (
        NATS, "[0, inf)",
        "Mean over positions 0..T-2 of sum p log(p / q); p is the unablated model's next-token distribution, q the "
        "arm's.",
    ),
    "kl_last": (NATS, "[0, inf)", "The same sum at position T-1 alone, after the whole sequence."),
    "top1": ("share", "[0, 1]", "Share of positions 0..T-2 at which both models' most probable token is the same."),
    "top5": (
        "share", "[0, 1]", "Mean share of the unablated model's five likeliest tokens that are among the arm's five."
    ),
    "sink_rate_first": ("share", "[0, 1]", "Share of (sequence, head) with alpha_0 > epsilon under the arm."),
    "sink_rate_any": (
        "share", "[0, 1]", "Share of (sequence, head) with alpha_k > epsilon at any key with at least T/4 query rows."
    ),
    "size": (
        "count", "[0, inf)",
        "How much of a sequence the arm touches, mean over sequences: heads zeroed, keys hidden, tokens kept (window, "
        "kv, acts), elements replaced.",
    ),
}  # fmt: skip
"""Unit, range and meaning of every measure, by its column."""

ERROR = "Its standard error over sequences (of a random arm's mean over draws)."


def _mean(name: str) -> tuple[ColumnSchema, ColumnSchema]:
    unit, span, what = NUMBERS[name]
    return (
        ColumnSchema(name, "number", unit, span, what),
        ColumnSchema(f"{name}_sem", "number", unit, "[0, inf)", ERROR),
    )


def _difference(name: str, what: str, error: str = ERROR) -> tuple[ColumnSchema, ColumnSchema, ColumnSchema]:
    return (
        ColumnSchema(name, "number", NATS, "(-inf, inf)", what),
        ColumnSchema(f"{name}_sem", "number", NATS, "[0, inf)", error),
        ColumnSchema(f"{name}_p", "number", "probability", "[0, 1]", "p of the two-sided t-test that it is 0."),
    )


ARMS_TABLES = {
    table.name: table
    for table in (
        TableSchema(
            "arms", "arms.csv", "one arm; the draws of a random one together",
            (ARM,),
            own=(
                ColumnSchema("control", "string", "", "", "The random arm that this one is held against."),
                ColumnSchema("family", "string", "", "", "The arms that differ by the number kept alone."),
                ColumnSchema("kept", "integer", "tokens", "[0, inf)", "That number."),
                ColumnSchema("draws", "integer", "count", "[1, inf)", "Draws of a random arm; 1 for any other."),
                ColumnSchema("size", "number", *NUMBERS["size"]),
                *_mean("loss"),
                *_difference("increase", "Loss minus the unablated model's on the same sequence: paired t-test."),
                *_difference(
                    "versus_random", "Loss minus the mean loss of the control's draws, paired by sequence.",
                    "Joins the errors over sequences and over draws; p by Welch and Satterthwaite.",
                ),
                ColumnSchema("spread", "number", NATS, "[0, inf)", "Standard deviation of the draws' mean losses."),
                *(
                    column
                    for name in ("kl", "kl_last", "top1", "top5", "sink_rate_first", "sink_rate_any")
                    for column in _mean(name)
                ),
                ColumnSchema(
                    "destroyed", "boolean", "", "",
                    "The increase exceeds log 10: the perplexity is more than 10 times the unablated model's.",
                ),
                *_difference(
                    "d_sink", "Loss of an acts arm minus its loss with the sinks kept in 16 bits, paired by sequence."
                ),
                ColumnSchema("d_sink_low", "number", NATS, "(-inf, inf)", "Lower end of its 95 % interval."),
                ColumnSchema("d_sink_high", "number", NATS, "(-inf, inf)", "Upper end of its 95 % interval."),
                ColumnSchema(
                    "knee", "boolean", "", "",
                    "The least number kept in its family whose increase is at most the family's lowest plus its error.",
                ),
            ),
        ),
        TableSchema(
            "arm_sequences", "arm_sequences.csv", "one (arm, draw, sequence)",
            (
                ARM, ColumnSchema("draw", "integer", "", "[0, inf)", "Number of the draw; empty if not random."),
                ColumnSchema("sequence", "integer", "", "[0, inf)", "Number of the sequence."),
                ColumnSchema("document", "string", "", "", "Names of the documents it was read from."),
            ),
            own=tuple(ColumnSchema(name, "number", *about) for name, about in NUMBERS.items()),
        ),
    )
}  # fmt: skip
"""Every table of arms, by name."""

"""Does the sink follow the BOS token or the first position? Asked by --first and --prepend."""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import HEAD, LAYER, MODULE, STREAM, ColumnSchema, TableSchema, key, number, with_sem


def _evidence(name: str, what: str) -> tuple[ColumnSchema, ...]:
    """A mean alpha with its error and the share of sequences in which it exceeds epsilon."""
    return (
        *with_sem(number(name, "probability", "[0, 1]", what)),
        number(
            f"{name}_rate",
            "share",
            "[0, 1]",
            "Share of these sequences in which it exceeds epsilon. "
            "Sequences of the same text count once, with the mean over them.",
        ),
    )


FIRST_COLUMNS = (
    *_evidence("alpha_0_bos_first", "Mean alpha_k at k = 0, over the sequences that begin with BOS."),
    *_evidence("alpha_0_other_first", "Mean alpha_k at k = 0, over the sequences without BOS."),
    *_evidence("alpha_bos_later", "Mean alpha_k at the position k of the first BOS, over the sequences in which "
        "BOS stands later, k > 0. Only datasets in which BOS stands at one position in every sequence count."),
    *_evidence("alpha_0_bos_later", "Mean alpha_k at k = 0, over the sequences of alpha_bos_later."),
    key(
        "verdict", "string", "token: alpha_bos_later > epsilon, so the sink follows BOS. position: alpha_0_other_first "
        "> epsilon, so the sink is at position 0 without BOS too. both, or none of the two. Empty where one of the two "
        "was not measured.",
    ),
)  # fmt: skip


QUESTION = Question(
    "first",
    "does the sink follow BOS or the first position (with --first, --prepend)?",
    __name__,
    (TableSchema(
        "first", "first.csv", "one (stream, layer, head); --first, --prepend",
        (STREAM, LAYER, HEAD, MODULE), own=FIRST_COLUMNS,
    ),),
    asked_by=("first", "prepend"),
    place=6,
)  # fmt: skip

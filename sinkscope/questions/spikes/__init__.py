"""Who writes the massive activations?"""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import DOMAIN, LAYER, STREAM, ColumnSchema, TableSchema

QUESTION = Question(
    "spikes",
    "who writes the massive activations?",
    __name__,
    (TableSchema(
        "spikes", "spikes.csv", "one (block, part, channel); --measure spikes",
        (
            DOMAIN, STREAM, LAYER, ColumnSchema("module", "string", "", "", "Path of the block."),
            ColumnSchema("part", "string", "", "", "What writes: attention or mlp."),
            ColumnSchema("channel", "integer", "", "", "A channel that holds massive elements; at most eight."),
            ColumnSchema(
                "position", "integer", "", "",
                "Position of the spike's token, the one of most sequences; in a tie "
                "the one whose first sequence comes first in the domain.",
            ),
        ),
        measured=("spikes",),
    ),),
    notation="The spike's token is the position where the residual stream, entering any block, has the sequence's "
    "largest absolute value. Every number is read there. Attention and MLP are told apart in blocks that add "
    "both to the residual stream; other blocks (BERT's, which normalise it) have no rows.",
    place=4,
)  # fmt: skip

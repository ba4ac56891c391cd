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
                "Position of the spike's token; of several sequences, the most frequent one. If several are equally "
                "frequent, the one whose first sequence comes first in the dataset.",
            ),
        ),
        measured=("spikes",),
    ),),
    notation="A sequence's spike is the largest absolute value in the residual stream as it enters any block. Every "
    "number is read at the token of the spike, where x_c is the value of the row's channel c. Attention and MLP are "
    "told apart in blocks that add both to the residual stream. Other blocks have no rows, such as BERT's, which "
    "normalise the sum.",
    place=4,
)  # fmt: skip

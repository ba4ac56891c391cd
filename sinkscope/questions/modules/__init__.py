"""What do the inputs of linear modules lose in 8 bits?"""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import DOMAIN, LAYER, STREAM, ColumnSchema, TableSchema

QUESTION = Question(
    "modules",
    "what do the inputs of linear modules lose in 8 bits?",
    __name__,
    (TableSchema(
        "modules", "modules.csv", "one linear module; --measure modules",
        (
            DOMAIN, STREAM, LAYER,
            ColumnSchema("module", "string", "", "", "Path of the linear module; path[n] for its n-th call."),
        ),
        measured=("modules",),
    ),),
    notation="x is an entry of the module's input, and |x| its absolute value. The scan quantises nothing: it computes "
    "what symmetric rounding to nearest would lose in 8 bits, with 127 levels on each side of 0. Each number is "
    "measured per sequence, and the table shows the mean over sequences. Stream and layer are empty outside the "
    "blocks.",
    place=3,
)  # fmt: skip

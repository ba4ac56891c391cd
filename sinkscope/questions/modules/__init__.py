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
    notation="x is an entry of the module's input. Nothing is quantised; symmetric round-to-nearest with 127 levels is "
    "meant. Entries that are 0 before are left out. Stream and layer are empty outside the blocks.",
    place=3,
)  # fmt: skip

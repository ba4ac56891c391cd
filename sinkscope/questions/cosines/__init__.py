"""How alike are the tokens of each prefix?"""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import DOMAIN, LAYER, MODULE, STREAM, ColumnSchema, TableSchema

LENGTH = ColumnSchema("length", "integer", "", "", "Tokens of the prefix.")

QUESTION = Question(
    "cosines",
    "how similar are the tokens of each prefix?",
    __name__,
    (TableSchema(
        "cosine_curve", "cosine_curve.csv", "one (stream, layer, length); --measure cosines",
        (DOMAIN, STREAM, LAYER, MODULE, LENGTH), measured=("cosine_curve",),
    ),),
    notation="Each number is measured on the first `length` tokens of every sequence, and the table shows the mean "
    "over sequences. All prefixes (--lengths) come from one pass. In a causal model they equal runs at that length.",
    place=8,
)  # fmt: skip

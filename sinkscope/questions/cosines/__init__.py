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
    notation="x is the residual stream entering the block, z what the q/k/v projections read. All prefixes (--lengths) "
    "come from one pass: in a causal model they equal runs at that length.",
    place=8,
)  # fmt: skip

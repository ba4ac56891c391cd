"""How do heads attend from each speaker's words? Asked by chats."""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import DOMAIN, HEAD, LAYER, STREAM, TableSchema, key, number, with_sem

REGION_COLUMNS = (
    key("sequences", "integer", "Number of sequences with queries i >= 1 in the region. The means are over these "
        "sequences."),
    key("queries", "integer", "Number of queries i >= 1 in the region, over all sequences."),
    *with_sem(
        number("bos_mass", "probability", "[0, 1]", "Mean A[i,0] over the queries of the region."),
        number("self_mass", "probability", "[0, 1]", "Mean A[i,i] over the queries of the region."),
        number("marker_mass", "probability", "[0, 1]", "Mean attention of these queries on the markers of the chat "
               "template, which include BOS."),
        number("entropy", "nats", "[0, log T]", "Mean entropy of the attention of these queries."),
    ),
)  # fmt: skip


QUESTION = Question(
    "regions",
    "how do heads attend from each speaker's words (in chats)?",
    __name__,
    (TableSchema(
        "regions", "regions.csv", "one (stream, layer, head, region); chats",
        (DOMAIN, STREAM, LAYER, HEAD, key("region", "string", "Part of the conversation that the queries belong to: a "
            "speaker, markers or generated.")),
        own=REGION_COLUMNS,
    ),),
    place=7,
)  # fmt: skip

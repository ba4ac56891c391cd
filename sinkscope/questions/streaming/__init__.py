"""What may a streaming KV cache forget? After Xiao et al. 2309.17453."""

from __future__ import annotations

from sinkscope.runs.defaults import SINKS, WINDOW
from sinkscope.runs.questions import Option, Question
from sinkscope.runs.schema.table import DOMAIN, HEAD, LAYER, MODULE, STREAM, TableSchema

QUESTION = Question(
    "streaming",
    "what may the KV cache forget?",
    __name__,
    (TableSchema(
        "streaming", "streaming.csv", "one (stream, layer, head); --measure streaming",
        (DOMAIN, STREAM, LAYER, HEAD, MODULE), measured=("streaming",),
    ),),
    notation="For query i, a cache keeps the first S keys (--sinks) and the last W keys (--window), the last of which "
    "is i's own. The keys S .. i - W between them are distant. Every column is empty where a sequence has no distant "
    "key (T <= S + W). It is also empty where a query sees later keys, since nothing is cached then.",
    options=(
        Option("window", WINDOW, "Recent keys that a streaming cache keeps.", least=1, most=2**24),
        Option("sinks", SINKS, "First keys that a streaming cache keeps.", least=0, most=2**24),
    ),
    place=5,
)  # fmt: skip

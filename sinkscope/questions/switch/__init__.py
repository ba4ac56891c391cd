"""Is a sink a switch that turns its head off, and which tokens turn the head on? After Lampert et al. 2605.08453."""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import DOMAIN, HEAD, LAYER, MODULE, STREAM, TableSchema, key

TOKEN_ID = key(
    "token_id", "integer", "Id of the token; where positions hold no tokens, the number of the position's kind."
)
TOKEN = key("token", "string", "The token as the vocabulary spells it.")
POSITION = key("position", "integer", "Position of the token.")

QUESTION = Question(
    "switch",
    "is a sink a switch that turns its head off?",
    __name__,
    (
        TableSchema(
            "switch", "switch.csv", "one (stream, layer, head); --measure switch",
            (DOMAIN, STREAM, LAYER, HEAD, MODULE), measured=("switch",),
        ),
        TableSchema(
            "switch_tokens", "switch_tokens.csv", "one (layer, head, token); --measure switch",
            (DOMAIN, STREAM, LAYER, HEAD, MODULE, TOKEN_ID, TOKEN), measured=("switch_tokens",),
        ),
        TableSchema(
            "alignment", "alignment.parquet", "one (layer, position); --measure switch",
            (DOMAIN, STREAM, LAYER, MODULE, POSITION), measured=("alignment",),
        ),
    ),
    notation="m is the mean over j >= 1 of norm(W_O^h v_j): how much the head writes where it copies one value. Query "
    "i is off where norm(W_O^h o_i) < 0.1 m, and on the sink where A[i,0] >= 0.9. Columns that need m are empty where "
    "it is 0.",
    place=2,
    figures=("alignment", "switch"),
)  # fmt: skip

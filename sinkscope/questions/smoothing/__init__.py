"""Does each head make tokens more similar? After Lampert et al. 2605.08453."""

from __future__ import annotations

from sinkscope.runs.questions import Question
from sinkscope.runs.schema.table import DOMAIN, HEAD, LAYER, MODULE, STREAM, TableSchema

QUESTION = Question(
    "smoothing",
    "does each head make tokens more similar?",
    __name__,
    (TableSchema(
        "smoothing", "smoothing.csv", "one (stream, layer, head); --measure smoothing",
        (DOMAIN, STREAM, LAYER, HEAD, MODULE), measured=("smoothing",),
    ),),
    notation="W = W_O^h W_V^h diag(gain of the input norm). x_i is the residual stream entering the block, z_i the "
    "normalised token without the norm's gain and bias (x_i itself where there is no norm). Only tokens i, j "
    ">= 1 count; zbar is the mean of their z_i, B = Cov(z) with 1/n. Biases are left out, and any norm or "
    "multiplier after W_O.",
    place=1,
    figures=("cosine", "smoothing", "ranks", "costs", "parts", "theory", "selected"),
)  # fmt: skip

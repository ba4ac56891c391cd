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
    notation="W = W_O^h W_V^h diag(gain), where gain is that of the block's input norm. In this table, z_i is the "
    "normalised token without the norm's gain and bias, or x_i itself where there is no norm. Only the n = T - 1 "
    "tokens i, j >= 1 count. xbar and zbar are the means of their x_i and z_i, and B is the covariance of their z_i, "
    "with 1/n. Where all z_i are equal, as at T = 2, beta, the stable rank r of the tokens and |B|_2 are empty, and so "
    "is what depends on them, and token_span is 0. They count as equal where tr B is at most 2^-36 of the mean of "
    "|z_i|^2, since rounding leaves as much between the tokens of one id, repeated. The same holds of the x_i. Biases "
    "are left out, and so is any norm or multiplier after W_O. Columns whose definition says `the first n sequences` "
    "are empty in all others.",
    place=1,
    figures=("cosine", "smoothing", "ranks", "costs", "parts", "theory", "selected"),
)  # fmt: skip

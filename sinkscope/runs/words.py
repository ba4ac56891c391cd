"""A stream's summary in sentences. A stream without a sink, or without dormant heads, gets a sentence that says so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sinkscope.runs.defaults import STATE_COSINE, STATE_NORM
from sinkscope.runs.request import Request
from sinkscope.runs.schema.manifest import FirstToken
from sinkscope.runs.schema.stream import DormantHeads, MassiveActivations, SinksBeyondFirst, SinkToken, StreamSummary

if TYPE_CHECKING:
    import pandas as pd

FIRST_MASS = "bos_mass"
"""The column of attention on the first token."""
NAMED = 3
"""Most channels that a sentence names."""
ALPHA_0 = "alpha_0, a mean over queries and sequences"
"""What the threshold of a sink is compared with."""
HONOR = "honor: norm of a head's output, divided by its mean over the heads of the layer"
"""What the column of the default rule of dormancy means."""


def first_mass(*firsts: FirstToken) -> str:
    """What attention on the first token is called: `BOS mass` where it is the tokenizer's BOS in all runs, and
    `first-token attention` where it is another token, differs, or where no tokenizer told."""
    return "BOS mass" if firsts and all(first.is_bos for first in firsts) else "first-token attention"


def sequences_of_tokens(count: int, tokens: int | str) -> str:
    """`32 sequences of 256 tokens`. `tokens`: of each."""
    return f"{count} sequence{'s' * (count != 1)} of {tokens} tokens"


def of_heads(some: int, heads: int, verb: str) -> str:
    """`1 of 72 heads gives`, `2 of 72 heads give`, `0 of 1 head gives`. `verb`: in the plural."""
    one = "has" if verb == "have" else f"{verb}s"
    return f"{some} of {heads} head{'s' * (heads != 1)} {one if 1 in (some, heads) else verb}"


def several_datasets(rows: pd.DataFrame) -> bool:
    """Whether rows of a table are of more than one dataset."""
    return "domain" in rows and bool(rows["domain"].nunique() > 1)


def dataset_of(row: pd.Series, rows: pd.DataFrame) -> dict[str, str]:
    """The dataset of a row that was chosen from rows of several, for the summary; nothing where there is one only."""
    return {"domain": str(row["domain"])} if several_datasets(rows) else {}


def on_dataset(named: dict[str, str]) -> str:
    """` on NAME` of what `dataset_of` returns, for a sentence."""
    return f" on {named['domain']}" if named else ""


def in_words(summary: StreamSummary, scores: list[str], normalised: bool, request: Request) -> list[str]:
    """Sentences about one stream. `scores`: the kinds of attention in it that are not a softmax; `normalised`: whether
    the rows of all of them are divided by their sum."""
    return _score_words(scores, normalised) if scores else _words(summary, request)


def _score_words(scores: list[str], normalised: bool) -> list[str]:
    if normalised:
        return [
            f"Attention is no softmax ({', '.join(scores)}), but its rows are divided by their sum. entropy, "
            "uniformity, sink_margin and learned_sink_mass, which are a softmax's, are empty."
        ]
    return [
        f"Attention is not normalised ({', '.join(scores)}): its masses are unnormalised weights, not shares of 1, so "
        "a threshold on them has no meaning. entropy, uniformity, sink_margin and learned_sink_mass are empty. "
        "bos_share in positions.parquet is |A[i,0]| over the row's sum."
    ]


def _words(summary: StreamSummary, request: Request) -> list[str]:
    words = [_sink_words(summary, request.epsilon)]
    told = not says_nothing(summary.uniform_alpha_0.T, request.epsilon)
    for top in summary.top_positions[:1]:  # masks may leave no key that enough queries see in every head
        if told and top.position != 0 and top.heads_over_epsilon:
            heads = f"{top.heads_over_epsilon} head{'s' * (top.heads_over_epsilon != 1)}"
            words.append(f"The strongest sink is position {top.position}, in {heads}.")
    massive = summary.massive_activations
    if massive.present:
        words.append(_massive_words(massive))
    elif massive.present is False:
        words.append("No massive activation: no element is above 100 and above 1000 x its layer's median.")
    dormant = summary.dormant
    words.append(f"Dormant by {dormant.rule}: {dormant_words(dormant, summary.heads)}{_rule_words(dormant.rule)}.")
    far = len(summary.windows.layers_out_of_reach)
    if far:
        words.append(_window_words(far, summary.layers))
    return words


def _window_words(far: int, layers: int) -> str:
    """About the `far` of a stream's layers whose later queries do not see the first token. alpha_k leaves these queries
    out, so that the first token may be a sink of tokens.csv where no head has an alpha_0 above epsilon."""
    have, their = ("has", "its") if far == 1 else ("have", "their")
    return (
        f"{far} of {layers} layer{'s' * (layers != 1)} {have} a window shorter than T: {their} later queries cannot "
        "reach the first token, and count as 0 in alpha_0."
    )


def _massive_words(massive: MassiveActivations) -> str:
    names = [str(channel.channel) for channel in massive.channels]
    channels = f"channel{'s' if len(names) > 1 else ''} {_listed(names[:NAMED])}"
    channels += f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    inputs = f"the input{'s' if len(massive.layers) > 1 else ''} of {_ranges(massive.layers)}"
    return (
        f"Massive activations: in {inputs}, in {channels}. The largest of them, of absolute value "
        f"{massive.max_abs:.4g}, enters layer {massive.layer} at position {massive.position}."
    )


def _rule_words(rule: str) -> str:
    """What the column of the default rule means; nothing for other rules."""
    return f" ({HONOR})" if re.match(r"honor\b", rule) else ""


def _ranges(layers: list[int]) -> str:
    """Sorted layer numbers in words, neighbours joined: `layers 1 to 14`, `layers 1 to 3, 7`, `layer 7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(parts)}"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def says_nothing(uniform: float | None, epsilon: float) -> bool:
    """Whether uniform attention itself passes the threshold, so that passing it is no sign of a sink."""
    return uniform is not None and uniform > epsilon


def dormant_count(dormant: DormantHeads, heads: int) -> int | None:
    """How many of a stream's heads are dormant; None where the rule's column is missing in every head."""
    return None if dormant.unknown == heads else dormant.count


def dormant_words(dormant: DormantHeads, heads: int) -> str:
    """How many of a stream's heads are dormant, and in how many that is not known."""
    if dormant_count(dormant, heads) is None:
        return "unknown, since its column is missing in every head"
    some = f" in every dataset, {dormant.in_some_domains} in some datasets only" if dormant.in_some_domains else ""
    unknown = f", unknown in {dormant.unknown} more" if dormant.unknown else ""
    judged = heads - dormant.unknown
    return f"{dormant.count or 'none'} of {judged} head{'s' * (judged != 1)}{some}{unknown}"


def _sink_words(summary: StreamSummary, epsilon: float) -> str:
    rate, base = summary.sink_rate_percent[f"{epsilon:g}"].T, summary.uniform_alpha_0.T
    if says_nothing(base, epsilon):
        return (
            f"Nothing can be said about sinks: with so few keys, uniform attention alone gives the first token an "
            f"alpha_0 of {base:.3f}, above {epsilon:g}. Measure longer sequences."
        )
    uniform = summary.uniform_rate_percent.get(f"{epsilon:g}")
    short = f" (uniform attention: {uniform.T:.1f} %)" if uniform is not None and uniform.T else ""
    if summary.sink_heads:
        give = of_heads(summary.sink_heads, summary.heads, "give")
        return (
            f"Attention sink: {give} the first token more than {epsilon:g} of "
            f"{'its' if summary.sink_heads == 1 else 'their'} attention ({ALPHA_0}; uniform attention gives "
            f"{base:.3f}). Sink rate: {rate:.1f} % of all (sequence, head) pairs exceed {epsilon:g}{short}."
        )
    return (
        f"No sink at the first token: no head gives it more than {epsilon:g} of its attention ({ALPHA_0}; uniform "
        f"attention gives {base:.3f})."
    )


def beyond_words(beyond: SinksBeyondFirst, epsilon: float) -> str:
    """The sentences about the sinks beyond the first token, or that there are none."""
    bound = f"alpha_k > {epsilon:g}"
    if not beyond.tokens:
        return f"Sinks beyond the first token ({bound}): none."
    listed = [token.token for token in beyond.tokens]
    names = ", ".join(
        _named(token, place == 0, listed.count(token.token) > 1) for place, token in enumerate(beyond.tokens)
    )
    more = f", and {beyond.others} more in tokens.csv" if beyond.others else ""
    if beyond.tokens[0].kind == "attention":
        last = "some are in the last layer" if beyond.gone is None else f"none is in layer {beyond.gone} or later"
        return f"Sinks beyond the first token ({bound}): {names}{more}. The first is in layer {beyond.created}; {last}."
    last = "some enter the last layer" if beyond.gone is None else f"none enters layer {beyond.gone} or later"
    return (
        f"Sinks beyond the first token ({bound}): none. Tokens with a hidden state similar to the first token's "
        f"(|cos| > {STATE_COSINE:g}, norm > {STATE_NORM:g} x the median): {names}{more}. The first enters layer "
        f"{beyond.created}; {last}."
    )


def _named(sink: SinkToken, first: bool, again: bool) -> str:
    """The token with its counts, which the `first` of a sentence explains; repr escapes what cannot be printed.

    `again`: whether the sentence names the same token in another region, too.
    """
    name = sink.region if sink.token is None else repr(sink.token) + (f" in {sink.region}" if again else "")
    heads = "" if sink.heads is None else f", in {sink.heads} head{'s' if sink.heads != 1 else ''}"
    return f"{name} ({sink.sinks} of {sink.occurrences}{' occurrences' if first else ''}{heads})"


def computed_in(dtype: str | None, device: str | None, quantization: str | None) -> str:
    """What a model computes in and where, and what quantised its weights."""
    return f"{dtype} on {device}" + ("" if quantization is None else f", quantised ({quantization})")

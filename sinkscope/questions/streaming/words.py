"""What the summary says of streaming.csv: how many heads may forget their distant keys."""

from __future__ import annotations

import pandas as pd

from sinkscope.runs.request import Request
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.words import of_heads, several_datasets

IDLE = 0.01
"""A head whose distant keys write a smaller share of its energy counts as one that may forget them."""


def add_streaming(streams: dict[str, StreamSummary], table: pd.DataFrame, request: Request) -> None:
    """Adds to the summary of each stream how many heads may forget their distant keys, in numbers and in words.

    A head counts where distant_write is below IDLE in every domain.
    """
    for name, stream in streams.items():
        rows = table[table["stream"] == name]
        heads = rows.groupby(["module", "head"], sort=False)["distant_write"].max()
        measured = int(heads.notna().sum())
        idle = int((heads < IDLE).sum())
        stream.measured["streaming"] = {
            "window": request.options["window"],
            "sinks": request.options["sinks"],
            "heads": measured,
            "idle_heads": idle,
        }
        kept = _kept(request.options["sinks"], request.options["window"])
        if measured:
            text = (
                f"{of_heads(idle, measured, 'write')} less than 1 % of {'its' if idle == 1 else 'their'} energy from "
                f"keys other than {kept}{', in every dataset' if several_datasets(rows) else ''}."
            )
        elif stream.causal and stream.tokens_per_sequence <= request.options["window"] + request.options["sinks"]:
            text = (
                f"the cache keeps every key, as no sequence is longer than {kept}. Longer sequences or a smaller "
                "window would tell."
            )
        else:
            text = "not measured: no causal self-attention whose heads' writes can be read."
        stream.in_words.append(f"Streaming: {text}")


def _kept(sinks: int, window: int) -> str:
    """The keys that a streaming cache keeps."""
    last = f"the last {window}{'' if sinks else ' tokens'}"
    return f"the first {f'{sinks} tokens' if sinks != 1 else 'token'} and {last}" if sinks else last

"""`sinkscope arms`: measures what a model loses under interventions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.arms_job import Model, RunFolder, TextLoss, Written, prepared
from sinkscope.cli.options import slug, with_options


@with_options
def arms(
    model: Model,
    arm: Annotated[list[str], typer.Option(metavar="ARM", help="KIND:REST, see above; may be repeated.")],
    run: RunFolder = None,
    *,
    text: TextLoss,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Folder of the results. [default: runs/MODEL-SLUG-arms]"),
    ] = None,
    written: Written,
) -> None:
    """Measure what a model loses under interventions (arms), each beside its random control.

    heads:SCORE:5%, heads:SCORE:low5%, heads:3.1+4.0 or heads:randomN: heads set to 0, the same in every sequence

    dynamic:SCORE:5% or dynamic:SCORE:low5%: in each sequence, the heads whose score crosses the run's quantile

    value:POSITIONS: values set to 0; keys:POSITIONS: keys hidden from later queries

    window:W+S, window:W+randomS, either with /full, then with /SCORE:50% or /randomN: queries see the last W keys and S
    first ones (or random ones), in all KV heads or in those that a score of the run, or chance, picks

    kv:BITS or kv:BITS+POSITIONS: keys and values rounded, some tokens kept in 16 bits

    acts:BITS/tensor or acts:BITS/token, either with +POSITIONS: inputs of linear modules rounded, some rows kept

    massive:zero or massive:mean, either with /first or /others: the run's massive activations replaced

    first-token:TEXT or first-token:random: another token at position 0

    neuron:L.N or neuron:L.random: one neuron of the MLP of layer L set to 0

    POSITIONS: firstN, middleN, recentN, randomN, sinks or sink-tokens

    Example: sinkscope arms example:gemma-3-270m --arm keys:first1 --arm window:256+4 --arm kv:4+first1
    """
    from sinkscope.experiments.arms.result import ARMS_FOLDER

    job = prepared(model, lambda: out or Path("runs") / f"{slug(model)}-arms", ARMS_FOLDER, text, written)
    from sinkscope.experiments.arms.experiment import arms as measure
    from sinkscope.present.figures.arms import draw_arms
    from sinkscope.present.terminal.arms import render_arms

    job.measure(measure, draw_arms, render_arms, arms=list(dict.fromkeys(arm)), run=run)

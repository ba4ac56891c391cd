"""What the figures of a single run show, and what their bands are: sentences for a paper's caption."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.figures.series import all_series, measured
from sinkscope.runs.catalogue import find_column

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


def caption(run: Run, figure: str, metric: str | None = None, domain: str | None = None) -> str:
    """The caption of a figure that `present.figures.run.draw` draws."""
    request = run.manifest.request
    what = {
        "heatmap": f"{_said(run, metric or 'bos_mass')} One cell a head, mean over sequences.",
        "profile": "BOS mass, alignment and norm of the first token, by layer: mean attention of queries 1.. on the "
        "first token over the layer's heads, mean cosine of the first token's residual stream with that of every "
        "other token, and its norm over theirs. Bands: standard error over sequences.",
        "length": "Sink score alpha_0 of prefixes of the sequence, all from one pass: the strongest sinks, the mean of "
        "all heads, and what uniform attention would give. Bands: standard error over sequences.",
        "scatter": f"BOS mass against HONOR, one dot a head. Circled: heads that the rule {request.dormant_rule} "
        "calls dormant.",
    }[figure]
    drawn = [each for each in all_series([run]) if domain in (None, each.data.domain)]
    return f"{what} {measured(drawn[:1])}"


def _said(run: Run, metric: str) -> str:
    """What a column of heads.csv is, as a sentence."""
    found = find_column(run.manifest, metric, "heads")
    return f"{metric}: {found.formula.rstrip('.')}." if found else f"{metric}."

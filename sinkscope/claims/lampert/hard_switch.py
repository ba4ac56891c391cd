"""Sinks as hard switches: in sunk rows the head is to write nothing."""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Rule, number, share
from sinkscope.claims.evidence import NO_PROBABILITIES, Evidence, head_name, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject

SINKING, AS_OFF = 0.05, 0.9


def find(run: Evidence, subject: Subject) -> Found:
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    heads = run.need("sink_rows", "off_rate", "sunk_not_off")
    sinking = heads[heads["sink_rows"] >= SINKING]
    figures = {"heads with sink rows (5 % of their rows)": share(heads["sink_rows"] >= SINKING)}
    if sinking.empty:
        return not_tested("no head gives the first token 0.9 in 5 % of its rows", figures)
    top = sinking.loc[sinking["sink_rows"].idxmax()]
    sunk, off = sinking["sink_rows"], sinking["off_rate"]
    both = sunk - sinking["sunk_not_off"]
    figures |= {
        "share of these heads' sink rows that are off": number(both.sum() / sunk.sum()),
        "smallest `open_q10` of heads with sink rows": number(sinking["open_q10"].min()),
        "the head that sinks most": head_name(top),
        **{
            f"its `{name}`": run.of_head(top, name)
            for name in ("sink_rows", "off_rate", "open_q50", "from_sink", "constant_share", "ov_drain")
        },
    }
    rest = (1 - sunk).sum()
    return Found(share(both / sunk >= AS_OFF), number((off - both).sum() / rest if rest else float("nan")), figures)


CLAIM = Claim(
    name="hard-switch",
    paper="2605.08453",
    by="Lampert et al.",
    title="a sink is a hard switch, with output 0",
    says=(
        "Sinks are equivalent to hard attention switches, whose output is identically 0, under the alignment of "
        "the sink's embedding with all others (Assumption 2)."
    ),
    source=(
        "section 4 as the abstract and other readers report it. It proves that a sink can replace a switch and a "
        "switch a sink. Whether trained heads are off in the rows of their sink has to be measured."
    ),
    assumes="On the sink: A[i,0] >= 0.9. Off: the head writes less than a tenth of one value.",
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule("share of the heads with sink rows that are off in at least 90 % of them", 0.9, 0.1),
    contrast="share of the same heads' other rows that are off",
    not_shown=(
        "The verdict depends on two thresholds; `open_q10` says how far the second may be moved. The rule does not "
        "exclude a switch that writes a constant, W_O v_0, instead of 0: for such a head `constant_share` is 1."
    ),
    figure="switch",
    place=1,
)

"""The first token's key lies in the direction of all queries, without being long."""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Rule, share
from sinkscope.claims.evidence import EPSILON, NO_PROBABILITIES, TOO_SHORT, Evidence, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject


def find(run: Evidence, subject: Subject) -> Found:
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    heads = run.need("qk_cos_first", "qk_cos_other", "k_norm_first", "k_norm_other")
    drains = heads["value_drain"].dropna() if "value_drain" in heads else []
    figures = {
        "heads whose queries point to the first key more than to others": share(
            heads["qk_cos_first"] > heads["qk_cos_other"]
        ),
        "heads whose first key is shorter than others": share(heads["k_norm_first"] < heads["k_norm_other"]),
        "mean `qk_cos_first`": run.of_heads("qk_cos_first"),
        "mean `qk_cos_other`": run.of_heads("qk_cos_other"),
        "heads with `value_drain` below 0.5": share(drain < 0.5 for drain in drains),
        "mean `key_bias`, nats": run.of_heads("key_bias") if "key_bias" in heads else share([]),
    }
    heads = run.telling(heads)
    if heads.empty:
        return not_tested(TOO_SHORT, figures)
    both = (heads["qk_cos_first"] > heads["qk_cos_other"]) & (heads["k_norm_first"] < heads["k_norm_other"])
    sinking = heads["sink_score"] > EPSILON
    if not sinking.any():
        return not_tested("no head has a sink", figures)
    return Found(share(both[sinking]), share(both[~sinking]), figures)


CLAIM = Claim(
    name="key-bias",
    paper="2410.10781",
    by="Gu et al.",
    title="the sink is a key bias: aligned with queries, and short",
    says=(
        "The first token's key lies in the direction of all queries without being long, so that it acts as a bias "
        "of keys."
    ),
    source="section 7, figures of angles and norms.",
    assumes="Cosines and norms are after position encoding, means over queries.",
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule("share of heads with a sink for which both hold", 0.9, 0.5),
    contrast="the same of heads without a sink",
    not_shown="A true bias would be the same for all queries, so that `key_bias` would be 0 nats.",
    place=4,
)

"""Does the sink stay at the first position, or follow BOS?"""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Rule, number, share
from sinkscope.claims.evidence import EPSILON, NO_PROBABILITIES, TOO_SHORT, Evidence, not_tested
from sinkscope.claims.needs import OPENINGS
from sinkscope.claims.subject import Subject
from sinkscope.runs.catalogue import by_old_alpha


def find(run: Evidence, subject: Subject) -> Found:
    if by_old_alpha(run.run.manifest):
        return not_tested("its alpha_k counted queries, too, from which a window hides key k: scan the model again")
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    table = run.telling(run.run.measured["first"])
    if table.empty:
        return not_tested(TOO_SHORT)
    judged = table[["alpha_0_bos_first", "alpha_bos_later", "alpha_0_other_first"]].notna().all(axis=1)
    sinks = table[judged & (table["alpha_0_bos_first"] > EPSILON)]
    token, position = sinks["alpha_bos_later"] > EPSILON, sinks["alpha_0_other_first"] > EPSILON
    places = {"token": token & ~position, "position": position & ~token, "both": token & position}
    figures = {"heads with a sink on BOS at position 0": share(table["alpha_0_bos_first"] > EPSILON)}
    if not judged.any():
        return not_tested("nothing says where its sinks go without BOS, or with BOS elsewhere", figures)
    if sinks.empty:
        return not_tested("no head has a sink on BOS", figures)
    figures |= {f"of these: {name}": share(there) for name, there in places.items()}
    figures["of these: none"] = share(~(token | position))
    later = [place for place in run.run.manifest.request.prepend if place]
    at, there = (f"alpha_{later[0]}", f"at {later[0]}") if len(later) == 1 else ("alpha_k at BOS", "at k > 0")
    figures |= {
        "mean alpha_0, BOS first": number(float(table["alpha_0_bos_first"].mean())),
        "mean alpha_0, another token first": number(float(table["alpha_0_other_first"].mean())),
        f"mean {at}, BOS {there}": number(float(table["alpha_bos_later"].mean())),
        f"mean alpha_0, BOS {there}": number(float(table["alpha_0_bos_later"].mean())),
    }
    return Found(figures["of these: position"], figures["of these: token"], figures)


CLAIM = Claim(
    name="stays-at-the-first-position",
    paper="2410.10781",
    by="Gu et al.",
    title="the sink stays at the first position",
    says="Models have a sink at the first position, whatever token stands there.",
    source="sections 3 and 4; LLaMA2-7B on one token repeated, with 0.00 %, is their own exception.",
    assumes=(
        "A sink stays if it is above epsilon with another token at position 0, and does not appear where BOS stands "
        "elsewhere."
    ),
    needs=OPENINGS,
    find=find,
    rule=Rule("share of sinks on BOS that stay at position 0", 0.9, 0.1),
    contrast="share that follow BOS to a later position",
    not_shown="A model that has never read text without BOS has had nothing to learn it from.",
    place=3,
)

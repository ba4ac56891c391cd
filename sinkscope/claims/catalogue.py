"""Finds the claims: those of the folders beside this file, and those of installed packages.

A package adds a claim by an entry point of the group `sinkscope.claims`, whose name is the claim's and whose object is
a `Claim`:

    [project.entry-points."sinkscope.claims"]
    my-claim = "my_package.my_claim:CLAIM"
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from sinkscope.claims.claim import Claim
from sinkscope.lookup import Lookup, of_that_name

PAPERS = ("ran_milo", "lampert", "gu")
"""The folders of claims, in the order of the page."""


def _built_in() -> dict[str, str]:
    home = Path(str(files("sinkscope") / "claims"))
    return {
        each.name.replace("_", "-"): f"sinkscope.claims.{paper}.{each.name}:CLAIM"
        for paper in PAPERS
        for each in pkgutil.iter_modules([str(home / paper)])
    }


CLAIMS: Lookup[Claim] = Lookup("--claim", _built_in(), "sinkscope.claims", of_that_name(Claim))


def chosen_claims(names: Sequence[str] = ()) -> list[Claim]:
    """The claims of these names, or all: in the order of papers, then of their places.

    Raises SinkscopeError for a name that is no claim.
    """
    wanted = [CLAIMS[name] for name in dict.fromkeys(names)] if names else CLAIMS.values()
    papers = list(dict.fromkeys(each.paper for each in CLAIMS.values()))
    return sorted(wanted, key=lambda each: (papers.index(each.paper), each.place, each.name))

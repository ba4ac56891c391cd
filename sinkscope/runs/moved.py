"""Columns that other versions of sinkscope measured otherwise: two runs are never held against each other there.

Up to schema version 2 alpha_k was divided by T-k (T both ways) also where the mask hides the key from some of these
queries. From version 3 on only queries that may see the key count. Without windows, chunks and prefixes both are the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError

if TYPE_CHECKING:
    from sinkscope.runs.schema.manifest import Manifest

ALPHA_OF_SEEING = 3
"""The schema version from which on alpha_k is a mean over the queries that may see key k."""
BY_ALPHA = ("sinks_per_sequence", "sink_elsewhere", "cos_peak_residual", "cos_peak_input")
"""The columns with a value for each sequence that read alpha_k."""

IN_TABLES = (*BY_ALPHA, "peak_position", "peak_score")
"""All columns of heads.csv and layers.csv that read alpha_k."""

Measured = tuple[int, bool | None]
"""The schema version of a run or baseline, and whether its model's masks hide keys; None where that is not known."""


def hides_keys(manifest: Manifest) -> bool:
    """Whether some attention call hides a key from a query that the order of positions lets see it.

    Runs of schema version 2 and older did not record it. They are judged by their windows and chunks.
    """
    longest = max((data.seq_len for data in manifest.data), default=0)
    for site in manifest.attention:
        reach = site.kind.size if site.causal else (site.kind.size or 0) // 2 or None
        if site.hides or (site.hides is None and reach is not None and reach < longest):
            return True
    return False


def by_old_alpha(manifest: Manifest) -> bool:
    """Whether the run holds an alpha_k that is not what it is now."""
    return manifest.schema_version < ALPHA_OF_SEEING and hides_keys(manifest)


def mixed(manifests: Sequence[Manifest]) -> bool:
    """Whether alpha_k is one thing in some of the runs, and another in others."""
    return any(map(by_old_alpha, manifests)) and any(each.schema_version >= ALPHA_OF_SEEING for each in manifests)


def refuse_mixed(names: Iterable[str], manifests: Sequence[Manifest]) -> None:
    """Raises SinkscopeError where these columns of several runs cannot stand in one table."""
    found = [name for name in names if name in IN_TABLES] if mixed(manifests) else []
    if found:
        raise SinkscopeError(_otherwise(found, "scan the older runs' models again, or leave these runs out"))


def moved(one: Measured, other: Measured) -> tuple[str, ...]:
    """The columns that the two measured otherwise than each other."""
    (one_version, one_hides), (other_version, other_hides) = one, other
    same = (one_version < ALPHA_OF_SEEING) == (other_version < ALPHA_OF_SEEING)
    return () if same or not (one_hides or other_hides) else BY_ALPHA


def refuse_moved(names: list[str], one: Measured, other: Measured, remedy: str) -> None:
    """Raises SinkscopeError where the two measured one of these columns otherwise. `remedy`: what to do then."""
    found = [name for name in names if name in moved(one, other)]
    if found:
        raise SinkscopeError(_otherwise(found, remedy))


def _otherwise(names: list[str], remedy: str) -> str:
    return (
        f"{', '.join(names)}: measured otherwise where the schema version is 2 or older: alpha_k counted queries, too, "
        f"from which a window hides key k; {remedy}"
    )

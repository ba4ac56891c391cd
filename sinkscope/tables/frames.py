"""The tables of a run, computed from its per-sequence values; `columns` declares the columns of the whole run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.metrics import stretches
from sinkscope.metrics.quantities import Quantity
from sinkscope.runs.request import Request
from sinkscope.runs.statistics import mean, sem
from sinkscope.tables.columns import RUN_COLUMNS, HeadRun, LayerRun
from sinkscope.tables.values import Domain, PlacesOf, SiteValues

KEYS = ("stream", "layer")


def site_keys(site: Site) -> dict[str, Any]:
    """The columns that identify an attention site in every table."""
    return {"stream": site.stream, "layer": site.layer}


def head_table(domains: list[Domain], sites: list[Site], request: Request) -> pd.DataFrame:
    """heads.csv: one row per (stream, layer, head), for each domain where there are several."""
    pieces = []
    for domain, site, values in sites_of(domains, sites):
        names = values.quantities.metrics.names("heads")
        averages, errors = mean(values.heads), sem(values.heads)
        rows: dict[str, Any] = domain_key(domains, domain) | site_keys(site)
        rows |= {
            "head": np.arange(site.heads),
            "kv_group": np.arange(site.heads) // (site.heads // site.kv_groups),
            "module": site.name,
            "kind": str(site.kind),
        }
        for index, name in enumerate(names):
            rows |= {name: averages[:, index], f"{name}_sem": errors[:, index]}
        run = HeadRun(values, {name: averages[:, i] for i, name in enumerate(names)}, request)
        rows |= {name: column.compute(run) for name, column in RUN_COLUMNS["heads"].items()}
        pieces.append(rows)
    return joined(pieces, {"pattern": "string"})


def layer_table(domains: list[Domain], sites: list[Site], heads: pd.DataFrame, request: Request) -> pd.DataFrame:
    """layers.csv: one row per (stream, layer), for each domain where there are several.

    `heads`: the table that `head_table` made of the same domains and sites.
    """
    rows, start = [], 0
    for domain, site, values in sites_of(domains, sites):
        of_site, start = heads.iloc[start : start + site.heads], start + site.heads
        metrics = values.quantities.metrics
        row: dict[str, Any] = domain_key(domains, domain) | site_keys(site)
        row |= {"module": site.name, "kind": str(site.kind), "heads": site.heads}
        averages, errors = mean(values.layers), sem(values.layers)
        for index, (name, metric) in enumerate(metrics.tables["layers"].items()):
            row |= {name: averages[index], f"{name}_sem": errors[index]} if metric.shown else {}
        run = LayerRun(values, of_site, request)
        row |= {name: column.compute(run) for name, column in RUN_COLUMNS["layers"].items()}
        over_heads = mean(values.heads.swapaxes(0, 1))
        averages, errors = mean(over_heads), sem(over_heads)
        for index, name in enumerate(metrics.names("heads")):
            row |= {f"mean_{name}": averages[index], f"mean_{name}_sem": errors[index]}
        rows.append(row)
    return _of_kinds(pd.DataFrame(rows), dict.fromkeys(("max_abs_token", "max_abs_dim", "dormant_heads"), "Int64"))


def position_table(domains: list[Domain], sites: list[Site], places: PlacesOf) -> pd.DataFrame:
    """positions.parquet: one row per (stream, layer, head, position), one column per quantity by position.

    Positions from `stretches.EVERY` on are left to stretches.parquet. `token`: missing where the sequences differ.
    """
    pieces = []
    for domain, site, values in sites_of(domains, sites):
        heads, keys = site.heads, min(values.keys, stretches.EVERY)
        shared = places[domain.name, site.name].shared[:keys]
        rows = domain_key(domains, domain) | site_keys(site)
        rows |= {"head": np.repeat(np.arange(heads), keys), "position": np.tile(np.arange(keys), heads)}
        rows |= {
            column: _by_key(values, quantity, heads, keys).ravel()
            for column, quantity in values.quantities.shown_in("positions").items()
        }
        pieces.append(rows | {"token": pd.array(shared * heads, dtype="string")})
    return joined(pieces)


def _by_key(values: SiteValues, quantity: Quantity, heads: int, keys: int) -> np.ndarray:
    """[H, K] from [H, position]; NaN at keys without a value, and for values by query where queries are no keys."""
    placed = np.full((heads, keys), np.nan)
    array = values.arrays.get(quantity.name)
    if array is not None and placed_at_keys(values, quantity):
        placed[:, : array.shape[1]] = array[:, :keys]
    return placed


def placed_at_keys(values: SiteValues, quantity: Quantity) -> bool:
    """Whether a quantity by position has its values at the positions of keys; by query only where queries are keys."""
    return quantity.dims[-1] != "query" or values.queries == values.keys


def curve_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """length_curve.csv: one row per (stream, layer, head, length); the mean and sem of each quantity by length.

    All lengths come from the same pass; sequences shorter than a length are left out of its row.
    """
    pieces = []
    for domain, site, values in sites_of(domains, sites):
        for index, length in enumerate(values.lengths):
            rows = domain_key(domains, domain) | site_keys(site)
            rows |= {"head": np.arange(site.heads), "length": length}
            for column, quantity in values.quantities.shown_in("length_curve").items():
                curve = values.arrays.get(quantity.name)
                at_length = np.full((values.count, site.heads), np.nan) if curve is None else curve[..., index]
                rows |= {column: mean(at_length), f"{column}_sem": sem(at_length)}
            pieces.append(rows)
    keys = [*domain_key(domains, domains[0]), *KEYS, "head", "length"]
    table = joined(pieces)
    order = table.groupby(keys[:-2], sort=False).ngroup()
    table = table.assign(_order=order).sort_values(["_order", "head", "length"], kind="stable", ignore_index=True)
    return table.drop(columns="_order")


def measured_table(
    table: str, domains: list[Domain], sites: list[Site], of_run: Callable[[Domain, Site, dict[str, np.ndarray]], Any]
) -> pd.DataFrame:
    """The table of a measurement with one row per (stream, layer, head), for each domain where there are several.

    Its metrics come first, each with its error. `of_run` gets a domain, a site and the means of the metrics [H] by
    name, and returns what the table's run columns are computed from.
    """
    pieces, columns = [], RUN_COLUMNS[table]
    for domain, site, values in sites_of(domains, sites):
        measured = values.measured[table]
        rows = domain_key(domains, domain) | site_keys(site)
        rows |= {"head": np.arange(site.heads), "module": site.name}
        averages, errors = mean(measured), sem(measured)
        names = values.quantities.metrics.names(table)
        for index, name in enumerate(names):
            rows |= {name: averages[:, index], f"{name}_sem": errors[:, index]}
        run = of_run(domain, site, {name: averages[:, index] for index, name in enumerate(names)})
        rows |= {name: column.compute(run) for name, column in columns.items()}
        pieces.append(rows)
    return joined(pieces, {name: "string" for name, column in columns.items() if column.unit == "name"})


def measured_curve(
    quantities: list[str], domains: list[Domain], sites: list[Site],
    columns: Callable[[dict[str, np.ndarray]], dict[str, object]],
) -> pd.DataFrame:  # fmt: skip
    """The table of a measurement with one row per (stream, layer, length), for each domain where there are several.

    `columns` gets the values [N, length] of each quantity by name, NaN where it is missing, and returns the columns.
    """
    frames = []
    for domain, site, values in sites_of(domains, sites):
        blank = np.full((values.count, len(values.lengths)), np.nan)
        curves = {name: values.arrays.get(name, blank) for name in quantities}
        rows = domain_key(domains, domain) | site_keys(site) | {"module": site.name, "length": values.lengths}
        frames.append(pd.DataFrame(rows | columns(curves)))
    return pd.concat(frames, ignore_index=True)


def sequence_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """sequences.parquet: every metric of every sequence; `head` is missing in rows that hold layer metrics."""
    pieces, blocks = [], []
    made: dict[tuple[str, int, int | None], dict[str, Any]] = {}  # the same rows for every site of as many heads
    for domain, site, values in sites_of(domains, sites):
        common = {"domain": domain.name, **site_keys(site), "module": site.name}
        of_heads = {"heads": values.heads} | values.measured
        for tables, heads in ((of_heads, site.heads), ({"layers": values.layers}, None)):
            key = (domain.name, values.count, heads)
            made[key] = made.get(key) or _sequence_keys(domain.documents[: values.count], heads)
            pieces.append(common | made[key])
            blocks.append(_by_name(values, tables))
    names = dict.fromkeys(name for block in blocks for name in block)
    lengths = [len(piece["sequence"]) for piece in pieces]
    # Column by column, and not copied: of many sequences, one more copy of all their values would fill memory.
    columns = {name: _column([piece[name] for piece in pieces], lengths) for name in pieces[0]}
    metrics = {name: _stacked([block.get(name) for block in blocks], lengths) for name in names}
    return pd.DataFrame(columns | metrics, copy=False)


def _sequence_keys(documents: list[str], heads: int | None) -> dict[str, Any]:
    """The columns that tell a site's rows apart: one for each sequence and head, or for each sequence."""
    count, number = len(documents), 1 if heads is None else heads
    head = [None] * count if heads is None else np.tile(np.arange(heads), count)
    return {
        "sequence": np.repeat(np.arange(count), number),
        "document": pd.array(np.repeat(documents, number), dtype="string"),
        "head": pd.array(head, dtype="Int64"),
    }


def _by_name(values: SiteValues, tables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of each metric [N, H] or [N]; `tables`: [N, H, metric] or [N, metric] by table."""
    return {
        name: array[..., index]
        for table, array in tables.items()
        for index, name in enumerate(values.quantities.metrics.names(table))
    }


def _stacked(blocks: list[np.ndarray | None], lengths: list[int]) -> np.ndarray:
    """One column of blocks of rows, in which the heads of a sequence follow each other; NaN where a block is None."""
    column = np.full(sum(lengths), np.nan)
    ends = np.cumsum(lengths)
    for block, length, end in zip(blocks, lengths, ends, strict=True):
        if block is not None:
            column[end - length : end] = block.ravel()
    return column


def sites_of(domains: list[Domain], sites: list[Site]) -> list[tuple[Domain, Site, SiteValues]]:
    """Every site of every domain that has values, with these."""
    return [(d, s, d.sites[s.name]) for d in domains for s in sites if s.name in d.sites]


def domain_key(domains: list[Domain], domain: Domain) -> dict[str, Any]:
    """The column that tells domains apart; none where there is one domain."""
    return {"domain": domain.name} if len(domains) > 1 else {}


def joined(pieces: list[dict[str, Any]], kinds: dict[str, str] | None = None) -> pd.DataFrame:
    """The table of pieces that have the same columns, in the order of the first one.

    A piece holds its columns by name: an array or list with a value for each row, or one value that all its rows have.
    `kinds`: the pandas type of the columns whose values do not tell it. Each column is put together once: a data frame
    for each piece takes ten times as long.
    """
    lengths = [max(len(value) for value in piece.values() if not _single(value)) for piece in pieces]
    columns = {name: _column([piece[name] for piece in pieces], lengths) for name in pieces[0]}
    return _of_kinds(pd.DataFrame(columns), kinds or {})


def _of_kinds(table: pd.DataFrame, kinds: dict[str, str]) -> pd.DataFrame:
    """The table, with these columns turned to these types: `astype` with a dictionary copies all other columns, too."""
    for name, kind in kinds.items():
        table[name] = table[name].astype(kind)
    return table


def _single(value: Any) -> bool:
    return isinstance(value, str) or not hasattr(value, "__len__")


def _column(values: list[Any], lengths: list[int]) -> Any:
    if any(isinstance(value, str) for value in values):
        return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    if any(isinstance(value, pd.api.extensions.ExtensionArray | pd.Series) for value in values):
        return pd.concat([pd.Series(value) for value in values], ignore_index=True)
    return np.concatenate([
        np.full(length, value) if _single(value) else np.asarray(value)
        for value, length in zip(values, lengths, strict=True)
    ])  # fmt: skip

"""A baseline: the means and errors of a run in one small JSON file, fit for git."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError
from sinkscope.runs.averages import mean, sem
from sinkscope.runs.per_sequence import LEVELS, PLACE, Cells, cells, chosen_metrics, domains

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


SCHEMA_VERSION = 1
KIND = "sinkscope baseline"
MEAN_DIGITS, ERROR_DIGITS = 5, 2
HEADER = ("bos", "seed", "epsilon", "dormant_rule", "first_token")
MODEL = ("id", "revision", "weights_sha256", "class", "dtype", "device", "tokenizer")
DATA = ("spec", "fingerprint", "sequences", "seq_len")


@dataclass(frozen=True)
class Level:
    """Attributes: places: one row a cell; mean, sem: [cell] by metric, NaN where missing or infinite; count:
    sequences; fewer: [cell] sequences that have a value, for the metrics that some sequences lack."""

    places: pd.DataFrame
    mean: dict[str, np.ndarray]
    sem: dict[str, np.ndarray]
    count: int
    fewer: dict[str, np.ndarray]

    def means(self, metric: str) -> np.ndarray:
        return self.mean.get(metric, np.full(len(self.places), np.nan))

    def errors(self, metric: str) -> np.ndarray:
        return self.sem.get(metric, np.full(len(self.places), np.nan))

    def counts(self, metric: str) -> np.ndarray:
        return self.fewer.get(metric, np.full(len(self.places), float(self.count)))


@dataclass(frozen=True)
class Baseline:
    """Attributes: facts: the manifest's part that a later scan must repeat; levels: by (domain, level)."""

    facts: dict[str, Any]
    levels: dict[tuple[str, str], Level]

    def fingerprints(self) -> dict[str, str]:
        """Domain by the fingerprint of its token sequences."""
        return {data["fingerprint"]: data["spec"] for data in self.facts["data"]}


def make_baseline(run: Run) -> Baseline:
    """Every metric of a run at every level: mean, standard error, count.

    Raises SinkscopeError for an interrupted run: its means are over part of the text that its fingerprint names.
    """
    if not run.manifest.get("complete", True):
        raise SinkscopeError(f"the run of {run.manifest['model']['id']} was interrupted: scan it to the end")
    names = chosen_metrics([run], [])
    levels = {
        (data["spec"], level): _measured(cells(run, data["spec"], level, names))
        for data in domains(run)
        for level in LEVELS
    }
    facts = {
        "model": {key: run.manifest["model"].get(key) for key in MODEL},
        "data": [{key: data[key] for key in DATA} for data in domains(run)],
        **{key: run.manifest.get(key) for key in HEADER},
    }
    return Baseline(facts, levels)


def _measured(found: Cells) -> Level:
    averages = mean(found.values)
    averages[~np.isfinite(averages)] = np.nan
    there = (~np.isnan(found.values)).sum(0).astype(float)
    columns = [dict(zip(found.names, table.T, strict=True)) for table in (averages, sem(found.values), there)]
    fewer = {name: own for name, own in columns[2].items() if ((own > 0) & (own < len(found.values))).any()}
    return Level(found.places, columns[0], columns[1], len(found.values), fewer)


def baseline_text(baseline: Baseline, version: str) -> str:
    """The file: schema_version first, one line a metric, so that git shows which moved.

    Means keep 5 significant digits, standard errors 2: far below what any sensible policy allows.
    """
    lines = [f'"schema_version": {SCHEMA_VERSION}', f'"kind": {_dump(KIND)}', f'"sinkscope": {_dump(version)}']
    lines += [f"{_dump(key)}: {_dump(value)}" for key, value in baseline.facts.items()]
    blocks = []
    for (domain, level), values in baseline.levels.items():
        places = values.places.to_dict("list")
        own = [f'"domain": {_dump(domain)}', f'"level": {_dump(level)}', f'"sequences": {values.count}']
        own += [f"{_dump(key)}: {_dump(places[key])}" for key in PLACE[level]]
        for label, digits, columns in (
            ("mean", MEAN_DIGITS, values.mean), ("sem", ERROR_DIGITS, values.sem), ("count", MEAN_DIGITS, values.fewer)
        ):  # fmt: skip
            metrics = ",\n".join(
                f"    {_dump(name)}: {_dump(_rounded(column, digits))}"
                for name, column in columns.items()
                if not np.isnan(column).all() or label != "mean"
            )
            own.append(f'"{label}": {{\n{metrics}\n  }}')
        blocks.append("{\n  " + ",\n  ".join(own) + "\n}")
    lines.append('"levels": [\n' + ",\n".join(blocks) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    from sinkscope.runs.strict_json import plain

    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _rounded(values: np.ndarray, digits: int) -> list[float | int]:
    short = [float(f"{value:.{digits}g}") for value in values]
    return [int(value) if value == value and abs(value) < 1e6 and value == int(value) else value for value in short]


def read_baseline(path: Path) -> Baseline:
    """Reads the file. Raises SinkscopeError where it is none, damaged, or of another schema."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SinkscopeError(f"cannot read the baseline {path}: {error.strerror}") from None
    except ValueError as error:
        raise SinkscopeError(f"baseline {path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SinkscopeError(f"{path} is no baseline: write one with `sinkscope baseline RUN -o FILE`")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise SinkscopeError(
            f"baseline {path} has schema version {data.get('schema_version')}, this sinkscope reads {SCHEMA_VERSION}: "
            "write it again with `sinkscope baseline`"
        )
    try:
        facts = {key: data[key] for key in ("model", "data", *HEADER)}
        return Baseline(facts, {(e["domain"], e["level"]): _level(e) for e in data["levels"]})
    except (KeyError, TypeError, ValueError) as error:
        raise SinkscopeError(f"baseline {path} is damaged: {type(error).__name__} {error}") from None


def _level(entry: dict[str, Any]) -> Level:
    places = pd.DataFrame({key: entry[key] for key in PLACE[entry["level"]]})
    columns = {}
    for label in ("mean", "sem", "count"):
        columns[label] = {name: np.array(values, dtype=float) for name, values in entry[label].items()}
        if any(len(values) != len(places) for values in columns[label].values()):
            raise ValueError("a metric has another number of values than there are places")
    return Level(places, columns["mean"], columns["sem"], int(entry["sequences"]), columns["count"])

"""A baseline: the means and errors of a run in one JSON file, small enough for git."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError, first_line
from sinkscope.runs.catalogue import Measured, hides_keys
from sinkscope.runs.per_sequence import LEVELS, PLACE, Cells, cells, chosen_metrics, domains
from sinkscope.runs.request import Request
from sinkscope.runs.run import need_run
from sinkscope.runs.schema.base import Record, read_record
from sinkscope.runs.schema.baseline import (
    KIND,
    READ,
    BaselineDomain,
    BaselineFile,
    BaselineLevel,
    BaselineModel,
)
from sinkscope.runs.schema.manifest import with_adapter
from sinkscope.runs.schema.old import baseline_from_0_1
from sinkscope.runs.statistics import mean, sem

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

R = TypeVar("R", bound=Record)


MEAN_DIGITS, ERROR_DIGITS = 5, 2


@dataclass(frozen=True)
class Level:
    """The values of one domain at one level.

    Attributes:
        places: one row per cell (a head, a layer or a stream).
        mean, sem: one array over cells for each metric; NaN where the value is missing or infinite.
        count: number of sequences.
        fewer: number of sequences that have a value, [cell], for the metrics that some sequences lack.
    """

    places: pd.DataFrame
    mean: dict[str, np.ndarray]
    sem: dict[str, np.ndarray]
    count: int
    fewer: dict[str, np.ndarray]

    def means(self, metric: str) -> np.ndarray:
        """Means of a metric, [cell]; all NaN where the level lacks it."""
        return self.mean.get(metric, np.full(len(self.places), np.nan))

    def errors(self, metric: str) -> np.ndarray:
        """Standard errors of a metric, [cell]; all NaN where the level lacks it."""
        return self.sem.get(metric, np.full(len(self.places), np.nan))

    def counts(self, metric: str) -> np.ndarray:
        """Number of sequences that have a value of the metric, [cell]."""
        return self.fewer.get(metric, np.full(len(self.places), float(self.count)))


@dataclass(frozen=True)
class Baseline:
    """How a run was measured, and its means and errors.

    Attributes:
        facts: the head of the file: request, model, data, first token.
        levels: the values of each (domain, level).
    """

    facts: BaselineFile
    levels: dict[tuple[str, str], Level]

    @property
    def request(self) -> Request:
        """The request of the run; `Request.of_model` asks the same of another model."""
        return self.facts.request

    @property
    def shown(self) -> str:
        """The model for people to read: the name that its scan was given (`--name`), else its id; and its adapter."""
        model, name = self.facts.model, self.facts.request.name
        if name is None:
            return model.shown
        return with_adapter(name, None if model.adapter is None else model.adapter.path)

    @property
    def measured(self) -> Measured:
        """By which definitions it was measured."""
        return self.facts.schema_version, self.facts.hides


def baseline_of(run: Run) -> Baseline:
    """Computes the mean, standard error and count of every metric of a run at every level.

    Raises SinkscopeError for an interrupted run: its fingerprints cover all of the text, its means only a part. Also
    for a run whose sequences belong to no domain of its manifest: nothing could be compared with it.
    """
    need_run(run)
    manifest = run.manifest
    if not manifest.complete:
        raise SinkscopeError(f"the run of {manifest.model.shown} was interrupted: scan it to the end")
    if not domains(run):
        raise SinkscopeError(
            f"the run of {manifest.model.shown} is damaged: sequences.parquet has no sequence of the data its manifest "
            "names, so nothing can be compared; scan it again"
        )
    names = chosen_metrics([run], [])
    levels = {
        (data.domain, level): _averaged(cells(run, data.domain, level, names))
        for data in domains(run)
        for level in LEVELS
    }
    facts = BaselineFile(
        schema_version=manifest.schema_version,
        hides=hides_keys(manifest),
        sinkscope=manifest.sinkscope,
        request=manifest.request,
        model=_shared_fields(BaselineModel, manifest.model),
        data=[_shared_fields(BaselineDomain, data) for data in domains(run)],
        first_token=manifest.first_token,
    )
    return Baseline(facts, levels)


def _shared_fields(kind: type[R], record: Record) -> R:
    """Makes a record of `kind` from another record that has all its fields."""
    names = set(kind.model_fields)
    return kind.model_validate(record.model_dump(by_alias=True, include=names))


def _averaged(cells: Cells) -> Level:
    averages = mean(cells.values)
    averages[~np.isfinite(averages)] = np.nan
    present = (~np.isnan(cells.values)).sum(0).astype(float)
    means, errors, counts = (
        dict(zip(cells.names, table.T, strict=True)) for table in (averages, sem(cells.values), present)
    )
    fewer = {name: count for name, count in counts.items() if ((count > 0) & (count < len(cells.values))).any()}
    return Level(cells.places, means, errors, len(cells.values), fewer)


def baseline_text(baseline: Baseline) -> str:
    """The text of the file. Every setting and every metric has a line of its own, so that `git diff` shows what moved.

    Means keep 5 significant digits and standard errors 2: the rounding is far below any sensible bound of a policy.
    """
    head = baseline.facts.model_dump(mode="json", by_alias=True, exclude={"levels"})
    lines = [f"{_dump(key)}: {_dump(value)}" for key, value in head.items()]
    blocks = []
    for (domain, level), values in baseline.levels.items():
        places = values.places.to_dict("list")
        entries = [f'"domain": {_dump(domain)}', f'"level": {_dump(level)}', f'"sequences": {values.count}']
        entries += [f"{_dump(key)}: {_dump(places[key])}" for key in PLACE[level]]
        for label, digits, columns in (
            ("mean", MEAN_DIGITS, values.mean), ("sem", ERROR_DIGITS, values.sem), ("count", MEAN_DIGITS, values.fewer)
        ):  # fmt: skip
            metrics = ",\n".join(
                f"    {_dump(name)}: {_dump(_rounded(column, digits))}"
                for name, column in columns.items()
                if not np.isnan(column).all() or label != "mean"
            )
            entries.append(f'"{label}": {{\n{metrics}\n  }}')
        blocks.append("{\n  " + ",\n  ".join(entries) + "\n}")
    lines.append('"levels": [\n' + ",\n".join(blocks) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    from sinkscope.runs.schema.base import plain

    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def as_kept(means: np.ndarray) -> np.ndarray:
    """Means as the file holds them."""
    return np.array(_shortened(means, MEAN_DIGITS), dtype=float)


def _shortened(values: np.ndarray, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


def _rounded(values: np.ndarray, digits: int) -> list[float | int]:
    short = _shortened(values, digits)
    return [int(value) if value == value and abs(value) < 1e6 and value == int(value) else value for value in short]


def read_baseline(path: str | Path) -> Baseline:
    """Reads a baseline file, also one of sinkscope 0.1. Raises SinkscopeError where it is damaged or no baseline."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except IsADirectoryError:
        raise SinkscopeError(
            f"{path} is no baseline: it is a folder, and no run's; give a file of `sinkscope baseline`, or a run folder"
        ) from None
    except OSError as error:
        raise SinkscopeError(f"cannot read the baseline {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SinkscopeError(
            f"baseline {path} is not JSON ({error}): write it again with `sinkscope baseline RUN -o FILE`"
        ) from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SinkscopeError(f"{path} is no baseline: write one with `sinkscope baseline RUN -o FILE`")
    version = data.get("schema_version")
    if version not in (1, *READ):
        raise SinkscopeError(
            f"baseline {path} has schema version {version}, this sinkscope reads 1 to {READ[-1]}: write it again with "
            "`sinkscope baseline`"
        )
    try:
        facts = read_record(BaselineFile, baseline_from_0_1(data) if version == 1 else data, f"baseline {path}")
        levels = {(entry.domain, entry.level): _level(entry) for entry in facts.levels}
        missing = [key for key in itertools.product([data.domain for data in facts.data], LEVELS) if key not in levels]
        if missing:
            raise ValueError(f"it has no level {missing[0][1]} of {missing[0][0]!r}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        detail = first_line(error)
        raise SinkscopeError(f"baseline {path} is damaged: {detail}") from None
    return Baseline(facts.model_copy(update={"levels": []}), levels)


def _level(entry: BaselineLevel) -> Level:
    places = pd.DataFrame({key: getattr(entry, key) for key in PLACE[entry.level]})
    columns = {}
    for label in ("mean", "sem", "count"):
        columns[label] = {name: np.array(values, dtype=float) for name, values in getattr(entry, label).items()}
        if any(len(values) != len(places) for values in columns[label].values()):
            raise ValueError("a metric does not have one value for each place")
    return Level(places, columns["mean"], columns["sem"], entry.sequences, columns["count"])

"""Measures what three papers claim about attention sinks, on Gemma-3-270M and on models of the trigger task.

    python examples/claims.py --out runs/claims

writes claims.csv, the numbers of docs/claims.md, into the folder, with the runs that they come from, and prints the
page's tables. What the folder holds already is read, not measured again. It takes about 25 minutes on two CPU cores,
two of them for training a model of the trigger task.

    python examples/claims.py --tables docs/claims.csv

prints the tables of numbers that were measured before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import gmean, spearmanr

import sinkscope
from sinkscope.checkpoints import open_checkpoint
from sinkscope.questions.switch.words import AS_OFF, CANCELLING, SILENT, SINKING, SWITCHING
from sinkscope.trigger.evaluation import evaluate
from sinkscope.trigger.recipe import Recipe
from sinkscope.trigger.training import train

GEMMA = "example:gemma-3-270m"
TEXTS, CONTROLS = ("prose", "code"), ("random", "repeated")
TRIGGERS = ("example:trigger-softmax", "example:trigger-relu")
TRAINED = (Recipe("softmax", 2, 2),)
EPSILON = "0.3"


@dataclass(frozen=True)
class Cell:
    """One number of the page: as it is shown, its value, and the standard error of a mean over n sequences."""

    shown: str
    value: float = np.nan
    sem: float = np.nan
    n: int = 0


Column = dict[str, Cell]
"""What a table says of one subject, by the name of the quantity."""


class Measured:
    """A run. `heads` holds a row for each head with the columns of heads.csv, switch.csv and smoothing.csv."""

    def __init__(self, run: sinkscope.Run) -> None:
        self.run, self.heads, self.layers = run, run.heads, run.layers
        for table in ("switch", "smoothing"):
            if table in run.measured:
                self.heads = self.heads.merge(run.measured[table], on=["stream", "layer", "head", "module"])
        self.summary = run.summary.streams["text"]

    def of_heads(self, column: str, kind: str = "") -> Cell:
        """The mean over heads, those of layers whose kind begins so, with the error over sequences."""
        rows, layers = self.run.sequences, self.layers[self.layers["kind"].str.startswith(kind)]["layer"]
        rows = rows[rows["head"].notna() & rows["layer"].isin(layers)]
        return mean(rows.groupby("sequence")[column].mean())

    def of_layers(self, column: str) -> Cell:
        rows = self.run.sequences
        return mean(rows[rows["head"].isna()].groupby("sequence")[column].mean())

    def of(self, row: pd.Series, column: str) -> Cell:
        """The mean of one head or layer, with its error."""
        return Cell(f"{row[column]:.3f} ± {row[f'{column}_sem']:.3f}", row[column], row[f"{column}_sem"],
                    self.run.manifest.data[0].sequences)  # fmt: skip


def number(value: float, digits: int = 3) -> Cell:
    return Cell("-" if np.isnan(value) else f"{value:.{digits}f}", float(value))


def count(chosen: Iterable[Any], among: int | None = None) -> Cell:
    """How many are true, of all or of `among`."""
    flags = np.asarray(list(chosen), dtype=bool)
    return Cell(f"{flags.sum()} of {len(flags) if among is None else among}", float(flags.sum()))


def mean(values: Iterable[float], digits: int = 3) -> Cell:
    """The mean of one value a sequence, with its standard error."""
    each = np.asarray(list(values), dtype=float)
    sem = each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else np.nan
    return Cell(f"{each.mean():.{digits}f} ± {sem:.{digits}f}", float(each.mean()), float(sem), len(each))


def named(row: pd.Series) -> str:
    return f"{row['layer']}.{row['head']}"


# What each table says of one subject


def trigger_task(found: Measured, model: Any) -> Column:
    result = evaluate(model)
    masses = np.array([[head["bos_mean"], head["bos_trigger"]] for head in result.heads])
    return {
        "largest error": number(result.error, 4),
        "heads with BOS mass >= 0.9 where no trigger stands": count(masses[:, 0] >= 0.9),
        "BOS mass there, smallest head": number(masses[:, 0].min()),
        "BOS mass there, largest head": number(masses[:, 0].max()),
        "BOS mass in the trigger's row, largest head": number(masses[:, 1].max()),
        "`off_rate`, mean of heads": number(found.heads["off_rate"].mean()),
        "`sink_rows`, mean of heads": number(found.heads["sink_rows"].mean()),
        "`off_not_sunk`, mean of heads": number(found.heads["off_not_sunk"].mean()),
    }


def triggers_in_the_wild(found: Measured) -> Column:
    heads, tokens = found.heads, found.run.measured["switch_tokens"]
    top = heads.loc[heads["off_rate"].idxmax()]
    opened = tokens[tokens["lift"] >= SWITCHING]
    return {
        "heads that are off in 5 % of their rows": count(heads["off_rate"] >= 0.05),
        "heads that are off in 0.1 % of their rows": count(heads["off_rate"] >= 0.001),
        "the head that is off most": Cell(named(top)),
        "its `off_rate`": found.of(top, "off_rate"),
        "its `sink_rows`": found.of(top, "sink_rows"),
        "its `off_not_sunk`": found.of(top, "off_not_sunk"),
        "its `bos_mass`": found.of(top, "bos_mass"),
        "tokens that double a head's share of rows that are on": Cell(str(opened["token_id"].nunique())),
    }


def switch(found: Measured) -> Column:
    heads = found.heads
    sinking = heads[heads["sink_rows"] >= SINKING]
    column = {
        "heads with sink rows (5 % of their rows)": count(heads["sink_rows"] >= SINKING),
        "of these, heads whose sink rows are off (90 %)": count(sinking["off_when_sunk"] >= AS_OFF),
        "share of all heads' sink rows that are off": number(
            1 - heads["sunk_not_off"].sum() / total if (total := heads["sink_rows"].sum()) else np.nan
        ),
        "smallest `open_q10` of heads with sink rows": number(sinking["open_q10"].min()),
    }
    if sinking.empty:
        return column
    top = sinking.loc[sinking["sink_rows"].idxmax()]
    return column | {
        "the head that sinks most": Cell(named(top)),
        **{
            f"its `{name}`": found.of(top, name)
            for name in ("sink_rows", "off_rate", "open_q50", "from_sink", "constant_share", "ov_drain")
        },
    }


def alignment(found: Measured) -> Column:
    layers, strongest = found.layers, found.heads.loc[found.heads["bos_mass"].idxmax()]
    sinking = layers[layers["sink_heads"] > 0]
    column = {"layers with a sink head": count(layers["sink_heads"] > 0)}
    for which, words in (("residual", "residual stream"), ("input", "behind the input norm")):
        low = f"cos_first_{which}_min"
        column |= {
            f"{words}: of these, layers whose smallest cosine is above 0": count(sinking[low] > 0),
            f"{words}: smallest cosine of any of these": number(sinking[low].min()),
            f"{words}: smallest cosine in the layer of the strongest sink": found.of(
                layers.set_index("layer").loc[strongest["layer"]], low
            ),
        }
    rank = spearmanr(layers["cos_first_input_min"], layers["mean_bos_mass"]).statistic if len(layers) > 2 else np.nan
    return column | {
        "layer of the strongest sink": Cell(str(strongest["layer"])),
        "over layers: rank correlation of that cosine (input) with BOS mass": number(rank, 2),
        "mean `cos_first_input`": found.of_layers("cos_first_input"),
        "mean `bos_mass`": found.of_heads("bos_mass"),
    }


def costs(found: Measured) -> Column:
    heads = found.heads
    known = heads[heads["cost_sink_upper"].notna()]
    upper, lower = known["cost_sink_upper"], known["cost_sink_lower"]
    return {
        "heads whose first token leads (margin above 0 in some sequence)": count(heads["cost_sink_upper"].notna()),
        **{f"`cheaper` = {name}": count(known["cheaper"] == name) for name in ("sink", "diagonal", "undecided")},
        "`cost_sink_upper` / `cost_sink_lower`, geometric mean": number(gmean(upper / lower), 0),
        "`cost_diagonal_upper` below `cost_sink_upper`": count(known["cost_diagonal_upper"] < upper),
        "`cost_diagonal_lower` above `cost_sink_lower`": count(known["cost_diagonal_lower"] > lower),
        "`cost_actual`": number(known["cost_actual"].mean(), 1),
        "heads with `bos_mass` above 0.5": count(heads["bos_mass"] > 0.5),
        "heads with `self_mass` above 0.5": count(heads["self_mass"] > 0.5),
    }


def mlp(found: Measured) -> Column:
    heads = found.heads
    least, own = (heads.loc[place] for place in (heads["communication"].idxmin(), heads["from_self"].idxmax()))
    return {
        "heads with `communication` below 5 %": count(heads["communication"] < SILENT),
        "smallest `communication`": found.of(least, "communication"),
        "of head": Cell(named(least)),
        "its `from_sink`": found.of(least, "from_sink"),
        "largest `from_self`": found.of(own, "from_self"),
        "head of that": Cell(named(own)),
        "its `communication`": found.of(own, "communication"),
        "its `self_mass`": found.of(own, "self_mass"),
    }


def compensation(found: Measured) -> Column:
    ratio = found.layers["compensation"] / found.layers["compensation_unrelated"]
    return {
        "layers whose heads cancel (10 % below right angles)": count(ratio < CANCELLING),
        "mean `compensation`": found.of_layers("compensation"),
        "mean `compensation_unrelated`": found.of_layers("compensation_unrelated"),
        "smallest `compensation` over `compensation_unrelated`": number(ratio.min()),
        "in layer": Cell(str(found.layers.loc[ratio.idxmin(), "layer"])),
    }


def smoothing(found: Measured) -> Column:
    heads = found.heads
    smooths, sharpens = (heads[heads["verdict"] == verdict] for verdict in ("smooths", "sharpens"))
    return {
        "heads that should smooth (tr(BW) x beta > 0)": count(heads["verdict"] == "smooths"),
        "of these, uniform attention makes tokens more alike than the head's own": count(
            smooths["uniform_minus_attention"] > 0
        ),
        "heads that should sharpen": count(heads["verdict"] == "sharpens"),
        "of these, uniform attention makes tokens less alike": count(sharpens["uniform_minus_attention"] < 0),
        "of all, the head's own attention makes tokens more alike than none": count(
            heads["attention_minus_identity"] > 0
        ),
    }


def sink_rate(found: Measured) -> Column:
    rates, at_64 = found.summary.sink_rate_percent[EPSILON], found.run.manifest.data[0].seq_len == 64
    return {
        "sink rate, % (eps 0.3, T = 64)": number(rates.T if at_64 else rates.t64, 1),
        "mean alpha_0": found.of_heads("sink_score" if at_64 else "sink_score_t64"),
        "uniform attention's alpha_0": number(
            found.summary.uniform_alpha_0.T if at_64 else found.summary.uniform_alpha_0.t64
        ),
    }


def dependence(found: Measured) -> Column:
    curve, rates = found.run.length_curve, found.summary.sink_rate_percent
    by_length = curve.groupby("length")[["sink_rate", "sink_score"]].mean()
    return {
        **{f"sink rate, %, T = {n}": number(100 * by_length.loc[n, "sink_rate"], 1) for n in by_length.index},
        **{f"sink rate, %, T = 256, eps {eps}": number(rates[eps].T, 1) for eps in ("0.2", "0.5", "0.8")},
        **{f"mean alpha_0, T = {n}": number(by_length.loc[n, "sink_score"]) for n in by_length.index},
        "mean `bos_mass`, full layers": found.of_heads("bos_mass", "full"),
        "mean `bos_mass`, sliding layers": found.of_heads("bos_mass", "sliding"),
    }


def token_or_position(found: Measured) -> Column:
    first = found.run.measured["first"]
    openings = {"BOS first": "first=bos prepend=0", "no BOS": "first=none prepend=0"}
    sinks = first[first["alpha_0_bos_first"] > float(EPSILON)]
    column = {
        "heads with a sink on BOS at position 0": count(first["alpha_0_bos_first"] > float(EPSILON)),
        **{f"of these: {name}": count(sinks["verdict"] == name) for name in ("token", "position", "both", "none")},
        "mean alpha_8, BOS at 8": number(first["alpha_bos_later"].mean()),
        "mean alpha_0, BOS at 8": number(first["alpha_0_bos_later"].mean()),
    }
    for words, ending in openings.items():
        rows = found.run.sequences[found.run.sequences["domain"].str.endswith(ending)].groupby("sequence")
        column[f"mean alpha_0, {words}"] = mean(rows["sink_score"].mean())
        column[f"mean `cos_first_residual`, {words}"] = mean(rows["cos_first_residual"].mean())
        column[f"mean `cos_first_input`, {words}"] = mean(rows["cos_first_input"].mean())
    return column


def key_bias(found: Measured) -> Column:
    heads = found.heads
    return {
        "heads with `qk_cos_first` above `qk_cos_other`": count(heads["qk_cos_first"] > heads["qk_cos_other"]),
        "mean `qk_cos_first`": found.of_heads("qk_cos_first"),
        "mean `qk_cos_other`": found.of_heads("qk_cos_other"),
        "heads with `k_norm_first` below `k_norm_other`": count(heads["k_norm_first"] < heads["k_norm_other"]),
        "heads with `value_drain` below 0.5": count(heads["value_drain"] < 0.5),
        "median `value_drain`": number(heads["value_drain"].median()),
        "median `ov_drain`": number(heads["ov_drain"].median()),
        "mean `key_bias`, nats": found.of_heads("key_bias"),
        "mean `from_sink`": found.of_heads("from_sink"),
        "heads with `from_sink` above 0.5": count(heads["from_sink"] > 0.5),
        "largest `norm_ratio` of a layer": number(found.layers["norm_ratio"].max(), 1),
    }


def losses(table: pd.DataFrame) -> Column:
    rows = table.set_index("arm")
    names = {
        "unablated loss": ("unablated", "loss"),
        "BOS's key hidden, increase": ("keys:first1", "increase"),
        "another key hidden, increase": ("keys:random1", "increase"),
        "BOS's value set to 0, increase": ("value:first1", "increase"),
        "another value set to 0, increase": ("value:random1", "increase"),
    }
    n = int(rows["sequences"].iloc[0])
    return {
        words: Cell(f"{value:.3f} ± {sem:.3f}", value, sem, n)
        for words, (arm, name) in names.items()
        for value, sem in [(rows.loc[arm, name], rows.loc[arm, f"{name}_sem"])]
    }


# Measuring


class Folder:
    """Where runs are kept: one that is there is read, another is measured and saved."""

    def __init__(self, path: Path, gemma: Any = GEMMA, tokenizer: Any = None) -> None:
        self.path, self.gemma, self.tokenizer = path, gemma, tokenizer

    def scan(self, name: str, model: Any = None, **options: Any) -> Measured:
        place = self.path / name
        if not (place / "manifest.json").exists():
            given = {"tokenizer": self.tokenizer} if model is None else {}
            sinkscope.scan(self.gemma if model is None else model, **given, **options).save(place)
        return Measured(sinkscope.load_run(place))

    def arms(self, name: str, **options: Any) -> pd.DataFrame:
        place = self.path / name
        if not (place / "arms.json").exists():
            sinkscope.arms(self.gemma, ["keys:first1", "value:first1"], tokenizer=self.tokenizer, **options).save(place)
        sequences = pd.read_csv(place / "arm_sequences.csv")["sequence"].nunique()
        return pd.read_csv(place / "arms.csv").assign(sequences=sequences)


Tables = dict[str, dict[str, Column]]
"""Tables by name; in each, a column for each subject."""
BOTH: dict[str, Any] = {"measure": ["switch", "smoothing"]}


def measure_gemma(folder: Folder, sequences: int, texts: Iterable[str] = TEXTS) -> Tables:
    """Openings and losses are measured on a quarter of the sequences: they take many passes."""
    tables: Tables = {}
    fewer = max(2, sequences // 4)
    for text in texts:
        subject = f"Gemma-3, {text}"
        found = folder.scan(f"gemma-{text}", data=text, num_sequences=sequences, spectra=sequences, **BOTH)
        told = folder.scan(f"gemma-{text}-first", data=text, num_sequences=fewer, first=["bos", "none"], prepend=[0, 8])
        for name, tell in ABOUT_A_RUN.items():
            tables.setdefault(name, {})[subject] = tell(found)
        tables.setdefault("token or position", {})[subject] = token_or_position(told)
        arms = folder.arms(f"gemma-{text}-arms", data=text, num_sequences=fewer, draws=2)
        tables.setdefault("losses", {})[subject] = losses(arms)
    for text in CONTROLS:
        found = folder.scan(f"gemma-{text}", data=text, num_sequences=sequences, seq_len=64)
        tables["sink rate"][f"Gemma-3, {text}"] = sink_rate(found)
    return tables


ABOUT_A_RUN: dict[str, Callable[[Measured], Column]] = {
    "triggers in the wild": triggers_in_the_wild, "switch": switch, "alignment": alignment, "costs": costs, "mlp": mlp,
    "compensation": compensation, "smoothing": smoothing, "sink rate": sink_rate, "dependence": dependence,
    "key bias": key_bias,
}  # fmt: skip


def measure_triggers(folder: Folder) -> Tables:
    """The two trained models that come with sinkscope."""
    tables: Tables = {}
    for name in TRIGGERS:
        subject = name.removeprefix("example:")
        found = folder.scan(subject, name, **BOTH)
        tables.setdefault("trigger task", {})[subject] = trigger_task(found, open_checkpoint(name).model)
        for table in ("switch", "alignment", "mlp"):
            tables.setdefault(table, {})[subject] = ABOUT_A_RUN[table](found)
        if "softmax" in name:
            tables["costs"] = {subject: costs(found)}
    return tables


def measure_trained(folder: Folder) -> Tables:
    """Two layers of two heads, trained here."""
    tables: Tables = {"trigger task": {}, "compensation": {}}
    for recipe in TRAINED:
        place = folder.path / recipe.name
        model = train(recipe, place, resume=place.exists())
        found = folder.scan(f"{recipe.name}-scan", str(place), measure=["switch"])
        subject = f"{recipe.attention} 2x2"
        tables["trigger task"][subject] = trigger_task(found, model)
        tables["compensation"][subject] = compensation(found)
    return tables


# Tables as text


def as_rows(*measured: Tables) -> pd.DataFrame:
    """claims.csv: a row for each number."""
    return pd.DataFrame([
        {"table": table, "quantity": quantity, "subject": subject, **vars(cell)}
        for tables in measured
        for table, columns in tables.items()
        for subject, column in columns.items()
        for quantity, cell in column.items()
    ])  # fmt: skip


def read_rows(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"shown": str})


def as_markdown(rows: pd.DataFrame) -> str:
    """One table of the page: quantities down, subjects across."""
    subjects = list(dict.fromkeys(rows["subject"]))
    shown = rows.set_index(["quantity", "subject"])["shown"].to_dict()
    lines = [["", *subjects], ["---", *["---:"] * len(subjects)]]
    lines += [[name, *(shown.get((name, each), "-") for each in subjects)] for name in dict.fromkeys(rows["quantity"])]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def print_tables(rows: pd.DataFrame) -> None:
    for name, each in rows.groupby("table", sort=False):
        print(f"\n{name}\n\n{as_markdown(each)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="folder for the runs and claims.csv")
    parser.add_argument("--num-sequences", type=int, default=32, help="of 256 tokens, of each text")
    parser.add_argument("--tables", type=Path, help="print the tables of this claims.csv; measure nothing")
    given = parser.parse_args()
    if given.tables:
        rows = read_rows(given.tables)
    else:
        folder = Folder(given.out)
        gemma = measure_gemma(folder, given.num_sequences)
        rows = as_rows(measure_triggers(folder), measure_trained(folder), gemma)
        rows.to_csv(given.out / "claims.csv", index=False, float_format="%.9g", lineterminator="\n")
    print_tables(rows)


if __name__ == "__main__":
    main()

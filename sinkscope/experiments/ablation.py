"""An ablation: zeroes the heads that a score calls dormant, and compares the loss with that of zeroing random heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Unablated
from sinkscope.experiments.arms.experiment import arms
from sinkscope.experiments.arms.head_choice import HeadTable, Score, check_fractions, head_table, read_score
from sinkscope.experiments.arms.kinds.heads import RandomHeads, ZeroedHeads
from sinkscope.experiments.arms.kinds.keys import HiddenKeys
from sinkscope.experiments.arms.positions import Positions
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.saved.ablation import HIDDEN, NAN, RANDOM, Ablation, ZeroedArm, summarise
from sinkscope.runs.saved.arms_table import UNABLATED

# An ablation: a grid of arms, of scores by shares of heads, each beside as many random heads.


TOKENS = ("first",)


def ablate(
    model: Any,
    run: Run | str | Path,
    *,
    scores: Sequence[str] | str = ("honor",),
    fractions: Sequence[float] = (0.05, 0.1, 0.2),
    tokens: str | None = None,
    data: Any = "prose",
    seq_len: int | None = None,
    num_sequences: int | None = None,
    draws: int = 5,
    seed: int = 0,
    tokenizer: Any = None,
    device: str = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    shards: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Ablation:
    """Zeroes the heads that scores of a run call dormant, and measures the loss on text that the run has not read.

    Zeroing a head sets its slice of the output projection's input to 0; the projection's bias stays. The loss is the
    next-token cross-entropy in nats per token, averaged over each sequence and then over sequences.

    Args:
        model: a name, or a causal language model in eval mode (then with `tokenizer`); the run must be of this model.
        run: the run, or its folder.
        scores: columns of heads.csv, or of another table with a row a head (smoothing.csv): NAME, or NAME:low /
            NAME:high to say which end is dormant.
        fractions: shares of all heads.
        tokens: "first" also measures the model with key 0 hidden from every query but query 0.
        data, seq_len, num_sequences: as for `sinkscope.arms`; what the run has read is left out.
        draws: number of random draws of equally many heads, the control.
        seed: seeds the draws of heads and of documents.
        shards: a folder that keeps every finished batch until the result is saved there. resume: continue from what
            an earlier ablation of the same model, text and heads left there.
        processes: as for `sinkscope.arms`.

    Raises:
        SinkscopeError: one line, for anything that the user can correct.
        KeyboardInterrupt: Ctrl-C; what was measured until then is in `shards`.
    """
    loaded = processes.run(lambda: run if isinstance(run, Run) else load_run(run))
    chosen = list(dict.fromkeys(map(read_score, [scores] if isinstance(scores, str) else scores)))
    shares = check_fractions([fractions] if isinstance(fractions, int | float) else list(fractions))
    if tokens is not None and tokens not in TOKENS:
        raise SinkscopeError(f"--tokens {tokens!r}: choose one of {', '.join(TOKENS)}")
    if not chosen or not shares:
        raise SinkscopeError("nothing to zero: at least one score and one fraction are needed")
    grid = _grid(head_table(loaded, chosen), chosen, shares)
    if tokens is not None:
        grid.append((HIDDEN, NAN, FirstKey(Positions("first", 1))))
    measured = arms(
        model, [arm for _, _, arm in grid], run=loaded, data=data, seq_len=seq_len, num_sequences=num_sequences,
        draws=draws, seed=seed, tokenizer=tokenizer, device=device, device_map=device_map, dtype=dtype,
        revision=revision, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle, shards=shards, resume=resume,
        progress=progress, processes=processes,
    )  # fmt: skip
    facts = {name: measured.facts[name] for name in ("model", "run", "data")} | {
        "scores": [score.name for score in chosen], "fractions": shares, "draws": draws, "seed": seed, "tokens": tokens,
    }  # fmt: skip
    zeroed = _zeroed(grid, measured.sequences, seed, tokens is not None)
    result = summarise(zeroed, measured.facts["data"]["documents"], facts, measured.warnings)
    result.arms = measured.table
    return result


Cell = tuple[str, float, Arm]
"""A row of ablation.csv: its name and its share of heads there, and the arm that measures it."""


@dataclass(frozen=True)
class FirstKey(HiddenKeys):
    """The first key hidden. A question of its own: no random key stands beside it."""

    def control(self) -> Arm | None:
        return None


def _grid(heads: HeadTable, scores: list[Score], fractions: list[float]) -> list[Cell]:
    """For every fraction an arm of each score, then the random one. Fractions of as many heads share a random arm."""
    cells: list[Cell] = []
    for fraction in fractions:
        try:
            count = heads.count(fraction)
        except SinkscopeError as error:
            raise SinkscopeError(f"--fraction: {error}") from None
        for score in scores:
            name = f"heads:{score.name}{100 * fraction:g}%"
            cells.append((score.name, fraction, ZeroedHeads(name, heads.dormant(score, count), heads)))
        cells.append((RANDOM, fraction, RandomHeads(count, heads)))
    return cells


def _zeroed(grid: list[Cell], sequences: pd.DataFrame, seed: int, sinks: bool) -> list[ZeroedArm]:
    """The rows of ablation.csv with their losses, a random arm's draws apart. `sinks`: with the sink rates of rows that
    zero no heads."""
    by_arm = dict(iter(sequences.groupby("arm", sort=False)))
    zeroed = []
    for name, fraction, arm in [(UNABLATED, NAN, Unablated()), *grid]:
        for draw, rows in by_arm[arm.name].groupby("draw", sort=False, dropna=False):
            number = None if pd.isna(draw) else int(draw)
            heads = arm.heads(seed, number or 0) if isinstance(arm, ZeroedHeads | RandomHeads) else {}
            rates = ("sink_rate_first", "sink_rate_any") if sinks and name in (UNABLATED, HIDDEN) else ()
            means = {rate: float(rows[rate].to_numpy().mean()) for rate in rates}
            zeroed.append(ZeroedArm(name, fraction, number, heads, rows["loss"].to_numpy(), means))
    return zeroed

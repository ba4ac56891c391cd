"""Runs the experiment: every arm zeroes chosen or random heads of one model and measures the same unread sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkscope.capture.alone import alone
from sinkscope.checkpoints import LoadOptions
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.ablation.result import HIDDEN, RANDOM, UNABLATED, Ablation, Arm, summarise
from sinkscope.experiments.arms.arm import Arm as EngineArm
from sinkscope.experiments.arms.engine import measure
from sinkscope.experiments.arms.finished import Finished, key_of
from sinkscope.experiments.arms.head_choice import HeadTable, Score, check_fractions, head_table, read_score
from sinkscope.experiments.arms.kinds.heads import ZeroedHeads
from sinkscope.experiments.arms.kinds.keys import HiddenKeys
from sinkscope.experiments.arms.measured import Measured
from sinkscope.experiments.arms.opening import Text, check_numbers, facts_of, opened_by_all
from sinkscope.experiments.arms.positions import Positions
from sinkscope.experiments.arms.statistics import table_of
from sinkscope.experiments.arms.zeroing import check_sites
from sinkscope.runs.run import Run, load_run

TOKENS = ("first",)


@alone("an ablation")
def ablate(
    model: Any,
    run: Run | str | Path,
    *,
    scores: Sequence[str] = ("honor",),
    fractions: Sequence[float] = (0.05, 0.1, 0.2),
    tokens: str | None = None,
    data: str = "prose",
    seq_len: int | None = None,
    num_sequences: int = 16,
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
        data: one SPEC; what the run has read is left out.
        seq_len: tokens per sequence; None takes the run's.
        draws: number of random draws of as many heads, the control.
        seed: seeds the draws of heads and of documents.
        shards: a folder that keeps every finished batch until the result is saved there. resume: continue from what
            an earlier ablation of the same model, text and heads left there.
        processes: as for `sinkscope.arms`.

    Raises:
        SinkscopeError: one line, for anything that the user can correct.
        KeyboardInterrupt: Ctrl-C; what was measured until then is in `shards`.
    """
    loaded = processes.run(lambda: run if isinstance(run, Run) else load_run(run))
    chosen = [read_score(score) for score in dict.fromkeys(scores)]
    shares = check_fractions(list(fractions))
    if tokens is not None and tokens not in TOKENS:
        raise SinkscopeError(f"--tokens {tokens!r}: one of {', '.join(TOKENS)}")
    text = Text(data, seq_len, num_sequences, seed)
    check_numbers(text, draws)
    if not chosen or not shares:
        raise SinkscopeError("nothing to zero: at least one score and one fraction are needed")
    arms = _arms(head_table(loaded, chosen), chosen, shares, draws, seed)
    report = progress or _silent
    report("loading", 0, 0)
    options = LoadOptions(
        revision, processes.device(device), device_map, dtype, trust_remote_code, allow_pickle, head=True
    )
    setting, corpus = opened_by_all(model, loaded, tokenizer, options, text, report, processes)
    check_sites(setting.sites)
    hidden = HiddenKeys(Positions("first", 1))
    engine_arms: list[EngineArm] = [ZeroedHeads(_engine_name(arm), arm.heads) for arm in arms]
    facts = facts_of(setting, corpus) | {
        "scores": [score.name for score in chosen], "fractions": shares, "draws": draws, "seed": seed, "tokens": tokens,
    }  # fmt: skip
    zeroed = [*([arm.name, arm.heads] for arm in arms), *([HIDDEN] if tokens else [])]
    key = key_of(facts | {"arms": zeroed}, setting)
    kept = processes.on_main(lambda: None if shards is None else Finished(Path(shards), key, resume))
    measured = measure(setting, [*engine_arms, hidden] if tokens else engine_arms, draws, report, kept, processes)
    arms = [Arm(UNABLATED), *arms, *([Arm(HIDDEN)] if tokens else [])]
    for arm, one in zip(arms, measured, strict=True):
        arm.losses = one.values["loss"]
        if tokens and arm.name in (UNABLATED, HIDDEN):
            arm.sinks = {name: float(one.values[name].mean()) for name in ("sink_rate_first", "sink_rate_any")}
    warnings = [*setting.checkpoint.warnings, *corpus.warnings, *setting.plan.failures]
    result = summarise(arms, corpus.documents, facts, warnings)
    result.arms = table_of(_once(arms, measured), _controls(arms))
    return result


def _silent(stage: str, done: int, total: int) -> None:
    """Shows no progress."""


def _arms(heads: HeadTable, scores: list[Score], fractions: list[float], draws: int, seed: int) -> list[Arm]:
    """One arm for every score, and for every random draw, at every fraction."""
    arms = []
    for fraction in fractions:
        count = heads.count(fraction)
        arms += [Arm(score.name, fraction, heads=heads.dormant(score, count)) for score in scores]
        arms += [Arm(RANDOM, fraction, draw, heads.drawn(count, seed + draw)) for draw in range(draws)]
    return arms


def _once(arms: list[Arm], measured: list[Measured]) -> list[Measured]:
    """What was measured, without the draws of a fraction that zeroes as many heads as an earlier one: they are the
    same draws, and an error over draws must not count them twice."""
    first: dict[str, float] = {}
    kept = []
    for arm, one in zip(arms, measured, strict=True):
        if arm.name != RANDOM or first.setdefault(one.name, arm.fraction) == arm.fraction:
            kept.append(one)
    return kept


def _engine_name(arm: Arm) -> str:
    """The arm's name in arms.csv; the draws of a fraction share one."""
    count = sum(map(len, arm.heads.values()))
    return f"heads:random{count}" if arm.name == RANDOM else f"heads:{arm.name}{100 * arm.fraction:g}%"


def _controls(arms: list[Arm]) -> dict[str, str]:
    """The control of every score's arm, by their names in arms.csv."""
    random = {arm.fraction: _engine_name(arm) for arm in arms if arm.name == RANDOM}
    return {_engine_name(arm): random[arm.fraction] for arm in arms if arm.fraction in random and arm.name != RANDOM}

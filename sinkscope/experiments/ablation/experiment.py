"""Runs the experiment: every arm zeroes chosen or random heads of one model and measures the same unread sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from sinkscope.capture import Plan, plan
from sinkscope.capture.alone import alone
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.probes import probe
from sinkscope.engine.batch_size import memory_needed
from sinkscope.engine.loop import Progress
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.ablation.choice import HeadTable, Score, check_fractions, head_table, read_score
from sinkscope.experiments.ablation.held_out import held_out
from sinkscope.experiments.ablation.intervene import check_sites, first_token_hidden, watched, zeroed
from sinkscope.experiments.ablation.loss import sequence_losses
from sinkscope.experiments.ablation.result import HIDDEN, RANDOM, UNABLATED, Ablation, Arm, summarise
from sinkscope.experiments.ablation.sinks import SinkCount
from sinkscope.inputs import Corpus
from sinkscope.runs.defaults import check_not_too_large
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
    progress: Progress | None = None,
) -> Ablation:
    """Zeroes the heads that scores of a run call dormant, and measures the loss on text that the run has not read.

    Zeroing a head sets its slice of the output projection's input to 0; the projection's bias stays. The loss is the
    next-token cross-entropy in nats per token, averaged over each sequence and then over sequences.

    Args:
        model: a name, or a causal language model in eval mode (then with `tokenizer`); the run must be of this model.
        run: the run, or its folder.
        scores: columns of heads.csv or smoothing.csv: NAME, or NAME:low / NAME:high to say which end is dormant.
        fractions: shares of all heads.
        tokens: "first" also measures the model with key 0 hidden from every query but query 0.
        data: one SPEC; what the run has read is left out.
        seq_len: tokens per sequence; None takes the run's.
        draws: number of random draws of as many heads, the control.
        seed: seeds the draws of heads and of documents.

    Raises:
        SinkscopeError: one line, for anything that the user can correct.
    """
    loaded = run if isinstance(run, Run) else load_run(run)
    chosen = [read_score(score) for score in dict.fromkeys(scores)]
    shares = check_fractions(list(fractions))
    if tokens is not None and tokens not in TOKENS:
        raise SinkscopeError(f"--tokens {tokens!r}: one of {', '.join(TOKENS)}")
    for option, number in (("seq-len", seq_len), ("num-sequences", num_sequences), ("draws", draws), ("seed", seed)):
        check_not_too_large(option, number)
    if seed < 0:
        raise SinkscopeError(f"--seed {seed}: 0 or more is needed")
    if draws < 2:
        raise SinkscopeError(f"--draws {draws}: at least 2 random choices are needed for a control")
    if seq_len is not None and seq_len < 2:
        raise SinkscopeError(f"--seq-len {seq_len}: at least 2 tokens are needed")
    if not chosen or not shares:
        raise SinkscopeError("nothing to zero: at least one score and one fraction are needed")
    heads = head_table(loaded.heads, loaded.smoothing, chosen)
    arms = [Arm(UNABLATED), *_arms(heads, chosen, shares, draws, seed)]
    report = progress or _silent
    report("loading", 0, 0)
    options = LoadOptions(revision, device, device_map, dtype, trust_remote_code, allow_pickle, head=True)
    checkpoint = open_checkpoint(model, options) if isinstance(model, str) else wrap_model(model, tokenizer, head=True)
    _same_model(checkpoint, loaded)
    base, found = _plan(checkpoint, loaded)
    corpus = held_out(data, checkpoint, loaded.manifest, seq_len, num_sequences, seed)
    meter = _LossMeter(checkpoint.model, base, found, corpus.ids, report, len(arms) + (2 if tokens else 0))
    report("ablating", 0, meter.arms * len(corpus.ids))
    with memory_needed("the loss"):
        for arm in arms:
            arm.losses = meter.measure(zeroed(base, found.sites, arm.heads))
        if tokens:
            arms.append(_hide_first(meter, arms[0], loaded.manifest.request.epsilon))
    facts = _facts(checkpoint, loaded, corpus, chosen, shares, draws, seed, tokens)
    return summarise(arms, corpus.documents, facts, [*checkpoint.warnings, *corpus.warnings, *found.failures])


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


@dataclass
class _LossMeter:
    """Measures losses on the model and sequences that all arms share."""

    model: nn.Module
    base: nn.Module
    plan: Plan
    ids: np.ndarray
    report: Progress
    arms: int
    done: int = 0

    def measure(self, intervention: AbstractContextManager[Any] = nullcontext()) -> np.ndarray:
        """Losses [N] under the intervention."""
        with intervention:
            losses = sequence_losses(self.model, self.ids, self._progress())
        self.done += 1
        return losses

    def _progress(self) -> Callable[[int], None]:
        total, before = self.arms * len(self.ids), self.done * len(self.ids)
        return lambda sequences: self.report("ablating", before + sequences, total)


def _hide_first(meter: _LossMeter, unablated: Arm, epsilon: float) -> Arm:
    """The arm with key 0 hidden. Sink rates are measured without and with hiding and stored in the two arms."""
    before, after = SinkCount(epsilon, len(meter.plan.sites)), SinkCount(epsilon, len(meter.plan.sites))
    meter.measure(watched(meter.model, before.receive, meter.plan.failures))
    losses = meter.measure(first_token_hidden(meter.model, after.receive, meter.plan.failures))
    unablated.sinks = before.rates()
    return Arm(HIDDEN, losses=losses, sinks=after.rates())


def _same_model(checkpoint: Checkpoint, run: Run) -> None:
    """Raises SinkscopeError for a run of other weights: scores of one model say nothing about another model's heads.

    Compares the hashes of the weights; where one is missing, the id and commit; where these are missing too (a model
    object), the model type. `_plan` compares the heads.
    """
    theirs, ours = run.manifest.model.model_dump(by_alias=True), checkpoint.facts
    for known in (("weights_sha256",), ("id", "revision"), ("model_type",)):
        pair = [[facts.get(name) for name in known] for facts in (theirs, ours)]
        if any(value is None for values in pair for value in values):
            continue
        if pair[0] != pair[1]:
            raise SinkscopeError(
                f"the run is of {run.manifest.model.shown}, whose weights are not those of {ours['id']}: scan this "
                "model first"
            )
        return


def _plan(checkpoint: Checkpoint, run: Run) -> tuple[nn.Module, Plan]:
    """The base model and its attention calls. Raises SinkscopeError where its heads are not those of the run."""
    base: nn.Module = getattr(checkpoint.model, "base_model", checkpoint.model)
    forward, short = Forward(base), probe(checkpoint)
    found = plan(base, lambda: forward(short))
    ours = {(site.name, head) for site in found.sites for head in range(site.heads)}
    if ours != {(str(module), int(head)) for module, head in zip(run.heads["module"], run.heads["head"], strict=True)}:
        raise SinkscopeError(f"the run's heads are not those of {checkpoint.name}: scan this model first")
    check_sites(found.sites)
    return base, found


def _facts(
    checkpoint: Checkpoint, run: Run, corpus: Corpus, scores: list[Score], fractions: list[float], draws: int,
    seed: int, tokens: str | None,
) -> dict[str, Any]:  # fmt: skip
    read: dict[str, Any] = {"spec": corpus.domain, "fingerprint": corpus.fingerprint, "documents": corpus.documents}
    read |= {"sequences": len(corpus.ids), "seq_len": int(corpus.ids.shape[1]), "bos": corpus.bos}
    return {
        "model": checkpoint.facts,
        "run": {
            "path": None if run.path is None else str(run.path),
            "data": [data.fingerprint for data in run.manifest.data],
        },
        "data": read,
        "scores": [score.name for score in scores],
        "fractions": fractions,
        "draws": draws,
        "seed": seed,
        "tokens": tokens,
    }  # fmt: skip

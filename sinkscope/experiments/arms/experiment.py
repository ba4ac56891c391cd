"""Runs the experiment: every arm on the same held-out sequences, with its random control beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkscope.capture.alone import alone
from sinkscope.checkpoints import LoadOptions
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Progress
from sinkscope.engine.manifest import unread
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Setting
from sinkscope.experiments.arms.asked import Text, check_numbers
from sinkscope.experiments.arms.engine import measure
from sinkscope.experiments.arms.finished import Finished, key_of
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.opening import facts_of, opened_by_all
from sinkscope.inputs.handed import loss_data
from sinkscope.runs.run import Run
from sinkscope.runs.saved.arms import Arms, summarise
from sinkscope.runs.saved.arms_table import UNABLATED


@alone("a measurement of arms")
def arms(
    model: Any,
    arms: Sequence[str | Arm],
    *,
    run: Run | str | Path | None = None,
    data: Any = "prose",
    seq_len: int | None = None,
    num_sequences: int | None = None,
    draws: int = 5,
    seed: int = 0,
    cosines: bool = False,
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
) -> Arms:
    """Measures what a causal language model loses under each arm, on text that the run has not read.

    Every arm reads the same sequences as the unablated model. The loss is the next-token cross-entropy in nats a token,
    a mean over positions 1..T-1 and then over sequences. A chosen arm gets its random control.

    Args:
        model: a name, or a causal language model in eval mode (then with `tokenizer`).
        arms: arms in the grammar of `sinkscope arms --help`, or objects of your own subclass of `Arm`.
        run: a run of this model, or its folder, where an arm asks one; what it has read is left out.
        data: one SPEC, texts or token ids as `sinkscope.scan` takes them. seq_len: tokens per sequence; None takes the
            length of token ids, else the run's, or 256. num_sequences: None takes all token ids, else 16.
        draws: how often a random arm is drawn.
        seed: seeds the random arms and the draw of documents.
        cosines: also measure how similar the tokens are behind each layer, under every arm (`Arms.cosines`).
        shards: a folder that keeps every finished batch until the result is saved there. resume: continue from what
            an earlier measurement of the same model, text and arms left there.
        processes: the result of `start_processes`, in a script that a launcher runs in several processes: they share
            the work, and all get the same tables.

    Raises:
        SinkscopeError: one line, for anything that the user can correct.
        KeyboardInterrupt: Ctrl-C; what was measured until then is in `shards`.
    """
    given = [read_arm(arm) if isinstance(arm, str) else arm for arm in arms]
    if not given:
        raise SinkscopeError("nothing to measure: at least one arm is needed")
    text = Text(loss_data(data), seq_len, num_sequences, seed)
    check_numbers(text, draws)
    report = progress or _silent
    report("loading", 0, 0)
    options = LoadOptions(
        revision, processes.device(device), device_map, dtype, trust_remote_code, allow_pickle, head=True
    )
    setting, corpus = opened_by_all(model, run, tokenizer, options, text, report, processes)
    chosen, controls = processes.run(lambda: expanded(given, setting))
    facts = facts_of(setting, corpus) | {
        "arms": [arm.name for arm in chosen],
        "draws": draws,
        "seed": seed,
        "cosines": cosines,
    }
    kept = processes.on_main(lambda: None if shards is None else Finished(Path(shards), key_of(facts, setting), resume))
    measured = measure(setting, chosen, draws, report, kept, processes, cosines)
    left_out = unread(setting.plan, {"status": "skipped"})
    warnings = [*setting.checkpoint.warnings, *corpus.warnings, *left_out, *setting.plan.failures]
    told = [sentence for arm in chosen for sentence in arm.told()]
    return processes.run(lambda: summarise(measured, controls, corpus.documents, facts, warnings, told))


def expanded(arms: Sequence[Arm], setting: Setting, only_counted: bool = False) -> tuple[list[Arm], dict[str, str]]:
    """The arms, made ready, with their companions and controls, each once; and the control's name by that of its arm.

    `only_counted`: the model has no numbers and no tokenizer; the arms then say how many they are, and cannot be run.
    Raises SinkscopeError where an arm cannot apply, and for an object that takes the name of another arm.
    """
    ready: dict[str, Arm] = {}
    controls: dict[str, str] = {}
    for arm in arms:
        for own in (arm, *arm.companions()):
            if own.name not in ready:
                ready[own.name] = own if only_counted and own.reads_tokens else own.ready(setting)
    if UNABLATED in ready:
        raise SinkscopeError(f"--arm {UNABLATED}: the unablated model is always measured")
    ready = {name: arm.foreseen() if only_counted else arm.prepared(setting) for name, arm in ready.items()}
    for name, arm in list(ready.items()):
        control = arm.control()
        if control is not None:
            controls[name] = control.name
            if control.name not in ready:
                ready[control.name] = control.ready(setting)
    return list(ready.values()), controls


def _silent(stage: str, done: int, total: int) -> None:
    """Shows no progress."""

"""Runs the experiment: opens the model, the run and the held-out text, and measures every arm on the same sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.capture import Plan, plan
from sinkscope.capture.alone import alone
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.checkpoint import check_length, default_length
from sinkscope.checkpoints.classes import unwrapped
from sinkscope.checkpoints.forward import Forward, probe
from sinkscope.checkpoints.tensor_hash import tensors_sha256
from sinkscope.checkpoints.tokenizers import tokenizer_needed
from sinkscope.checkpoints.wrappers import inner_model
from sinkscope.engine.launch import ALONE, Processes
from sinkscope.engine.loop import Progress
from sinkscope.engine.manifest import unread
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Setting, blaming, check_run
from sinkscope.experiments.arms.changes import check_next_token
from sinkscope.experiments.arms.engine import measure
from sinkscope.experiments.arms.finished import Finished, key_of
from sinkscope.experiments.arms.grammar import read_arms
from sinkscope.experiments.arms.kinds.window import Window
from sinkscope.experiments.arms.text import SEQUENCES, Text, check_numbers
from sinkscope.inputs import Corpus, read_corpus, token_rules
from sinkscope.inputs.handed import TokenRows, loss_data
from sinkscope.runs.defaults import EPSILON, SEQ_LEN
from sinkscope.runs.passages import NothingLeft, Passage
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.saved.arms import Arms, summarise
from sinkscope.runs.saved.arms_table import UNABLATED
from sinkscope.runs.schema.manifest import Manifest, ModelFacts


def size_of(text: Text, checkpoint: Checkpoint, manifest: Manifest | None) -> tuple[int, int]:
    """How many sequences are read, and tokens of each. Raises SinkscopeError for token ids of several lengths without
    `seq_len`."""
    token_rows = text.data if isinstance(text.data, TokenRows) else None
    count = text.num_sequences or (SEQUENCES if token_rows is None else len(token_rows.rows))
    if text.seq_len or token_rows is not None:
        return count, text.seq_len or (0 if token_rows is None else token_rows.length)
    measured = [] if manifest is None else manifest.data
    return count, max((data.seq_len for data in measured), default=default_length(checkpoint, SEQ_LEN))


def held_out(text: Text, checkpoint: Checkpoint, manifest: Manifest | None) -> Corpus:
    """Reads as many sequences as are asked for, or as are left, without anything that the run has read.

    Documents are recognised by their content, whatever their file is called. Without a run (`manifest` None) nothing is
    left out. Raises SinkscopeError where fewer than 2 sequences are left, they are the run's own sequences, the data
    cannot be read, or there is no tokenizer.
    """
    spec = text.data if isinstance(text.data, str) else text.data.NAME
    read = [] if manifest is None else manifest.data
    count, length = size_of(text, checkpoint, manifest)
    check_length(checkpoint, length)
    without = [] if manifest is None else read_before(manifest)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    bos = _bos(manifest)
    try:
        with tokenizer_needed(checkpoint):
            corpus = read_corpus(text.data, checkpoint.tokenizer, rules, length, count, bos, text.seed, without=without)
    except NothingLeft:
        raise SinkscopeError(
            f"--data {spec}: the run has read it all, nothing is left to measure a loss on; give other --data, or scan "
            "with fewer --num-sequences"
        ) from None
    if corpus.fingerprint in {data.fingerprint for data in read}:
        raise SinkscopeError(f"--data {spec}: these are the very sequences the run read; give another --seed or --data")
    if len(corpus.ids) < 2:
        raise SinkscopeError(f"--data {spec}: one sequence is left; a loss with its error needs two")
    return corpus


def further(text: Text, checkpoint: Checkpoint, manifest: Manifest | None, corpus: Corpus, count: int) -> Corpus:
    """Reads `count` more sequences of the text that `corpus` was read from, as long as its own, or as many as are left,
    without anything that it holds.

    What the run has read is not left out. Raises SinkscopeError where nothing is left.
    """
    without = [passage for pieces in corpus.passages for passage in pieces]
    rules, length = token_rules(checkpoint.tokenizer, checkpoint.vocabulary), corpus.ids.shape[1]
    try:
        return read_corpus(
            text.data, checkpoint.tokenizer, rules, length, count, _bos(manifest), text.seed, without=without
        )
    except NothingLeft:
        raise SinkscopeError(
            f"--data {corpus.domain}: all of it is measured, and nothing is left to fit a map on; give other --data, "
            "or fewer --num-sequences"
        ) from None


def _bos(manifest: Manifest | None) -> str:
    """Whether BOS stands first, as the run asked for it."""
    return "auto" if manifest is None else manifest.request.bos[0]


def read_before(manifest: Manifest) -> list[Passage | str]:
    """Everything that a run has read: passages by content, or names of documents where sinkscope 0.1 wrote the run.

    0.1 recorded names only, and joined those of several documents with ` + `: both the whole name and its parts count.
    """
    passages: list[Passage | str] = [
        passage for data in manifest.data for pieces in data.passages for passage in pieces
    ]
    old = [data.documents for data in manifest.data if not data.passages]
    return passages + [name for names in old for joined in names for name in (joined, *joined.split(" + "))]


# Opens the model, the run and the held-out text of a measurement, and checks that they fit each other.


def opened(
    model: Any, run: Run | str | Path | None, tokenizer: Any, options: LoadOptions, text: Text, report: Progress
) -> tuple[Setting, Corpus]:  # fmt: skip
    """Loads the model with its head, makes the dry run and reads the text.

    Raises SinkscopeError where the model does not predict the next token, the run is of another model, or the text
    cannot be had.
    """
    loaded = run if isinstance(run, Run) or run is None else load_run(run)
    named = isinstance(model, str)
    checkpoint = open_checkpoint(model, options, report) if named else wrap_model(model, tokenizer, head=True)
    if loaded is not None:
        _same_model(checkpoint, loaded)
    base, calls = planned(checkpoint)
    check_next_token(checkpoint.name, calls)
    if loaded is not None:
        _same_heads(checkpoint, calls, loaded)
    manifest = None if loaded is None else loaded.manifest
    corpus = held_out(text, checkpoint, manifest)
    epsilon = EPSILON if manifest is None else manifest.request.epsilon
    setting = Setting(checkpoint, base, calls, torch.from_numpy(corpus.ids), loaded, text.seed, epsilon)
    setting.more_text = lambda count: torch.from_numpy(further(text, checkpoint, manifest, corpus, count).ids)
    return setting, corpus


def opened_by_all(
    model: Any, run: Run | str | Path | None, tokenizer: Any, options: LoadOptions, text: Text, report: Progress,
    processes: Processes,
) -> tuple[Setting, Corpus]:  # fmt: skip
    """As `opened`, in every process of a launch.

    Raises SinkscopeError also where the processes cannot share the work, or read other weights or text.
    """
    if processes.tensor:
        raise SinkscopeError("--tp spreads the heads of a scan; arms are shared by processes without it")
    processes.check(model, options.device_map)
    setting, corpus = processes.run(lambda: opened(model, run, tokenizer, options, text, report))
    processes.require_same([setting.checkpoint.facts["weights_sha256"], corpus.fingerprint])
    return setting, corpus


def _same_model(checkpoint: Checkpoint, run: Run) -> None:
    """Raises SinkscopeError for a run of other weights: scores of one model say nothing about another model's heads.

    Compares the hashes of the weights; where one is missing, the id and commit; where these are missing too (a model
    object), the model type. So two model objects of one type are told apart only where the run holds the hash of its
    object's numbers, which a scan with `shards` puts there. `_same_heads` compares the heads.
    """
    if _other_numbers(checkpoint, run.manifest.model):
        raise _another_model(checkpoint, run)
    run_model, model = run.manifest.model.model_dump(by_alias=True), checkpoint.facts
    for names in (("weights_sha256",), ("id", "revision"), ("model_type",)):
        pair = [[facts.get(name) for name in names] for facts in (run_model, model)]
        if any(value is None for values in pair for value in values):
            continue
        if pair[0] != pair[1]:
            raise _another_model(checkpoint, run)
        return


def _other_numbers(checkpoint: Checkpoint, told: ModelFacts) -> bool:
    """Whether a model object holds other numbers than the one that was scanned, in the same dtype. A scan hashes the
    base model, without the head."""
    if checkpoint.origin or told.tensors_sha256 is None or told.dtype != checkpoint.facts["dtype"]:
        return False
    return tensors_sha256(inner_model(unwrapped(checkpoint.model))) not in (None, told.tensors_sha256)


def _another_model(checkpoint: Checkpoint, run: Run) -> SinkscopeError:
    return SinkscopeError(
        f"the run is of {run.manifest.model.shown}, whose weights are not those of {checkpoint.facts['id']}: scan this "
        "model first"
    )


def planned(checkpoint: Checkpoint) -> tuple[nn.Module, Plan]:
    """The base model and its attention calls."""
    base = unwrapped(checkpoint.model)
    forward, short = Forward(base), probe(checkpoint)
    return base, plan(base, lambda: forward(short))


def _same_heads(checkpoint: Checkpoint, calls: Plan, run: Run) -> None:
    """Raises SinkscopeError where the model's heads are not those of the run."""
    ours = {(site.name, head) for site in calls.sites for head in range(site.heads)}
    if ours != {(str(module), int(head)) for module, head in zip(run.heads["module"], run.heads["head"], strict=True)}:
        raise SinkscopeError(f"the run's heads are not those of {checkpoint.name}: scan this model first")


def facts_of(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    """What was measured, for the JSON files: the model, the run and the text."""
    read: dict[str, Any] = {"spec": corpus.domain, "fingerprint": corpus.fingerprint, "documents": corpus.documents}
    read |= {"sequences": len(corpus.ids), "seq_len": int(corpus.ids.shape[1]), "bos": corpus.bos}
    run = setting.run
    return {
        "model": setting.checkpoint.facts,
        "run": None if run is None else {
            "path": None if run.path is None else str(run.path),
            "data": [data.fingerprint for data in run.manifest.data],
        },
        "data": read,
    }  # fmt: skip


# Runs the experiment: every arm on the same held-out sequences, with its random control beside it.


@alone("a measurement of arms")
def arms(
    model: Any,
    arms: Sequence[str | Arm] | str | Arm,
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

    Every arm reads the same sequences as the unablated model. The loss is the next-token cross-entropy in nats per
    token, a mean over positions 1..T-1 and then over sequences. A chosen arm gets its random control.

    Args:
        model: a name, or a causal language model in eval mode (then with `tokenizer`).
        arms: arms in the grammar of `sinkscope arms --help`, or objects of your own subclass of `Arm`; one or several.
        run: a run of this model, or its folder, where an arm asks one; what it has read is left out.
        data: one SPEC, texts or token ids as `sinkscope.scan` takes them. seq_len: tokens per sequence; None takes the
            length of token ids, else the run's, or 256, or the model's positions where these are fewer. num_sequences:
            None takes all token ids, else 16.
        draws: how often a random arm is drawn.
        seed: seeds the random arms and the draw of documents.
        cosines: also measure how similar the tokens are behind each layer, under every arm (`Arms.cosines`).
        shards: a folder that keeps every finished batch until the result is saved there. resume: continue from what
            an earlier measurement of the same model, text and arms left there. A model object is told by the numbers
            in it, an arm of your own by its name and the file of its code.
        processes: the result of `start_processes`, in a script that a launcher runs in several processes: they share
            the work, and all get the same tables.

    Raises:
        SinkscopeError: one line, for anything that the user can correct.
        KeyboardInterrupt: Ctrl-C; what was measured until then is in `shards`.
    """
    parsed = read_arms(arms)
    for arm in parsed:
        check_run(arm, run)
    text = Text(loss_data(data), seq_len, num_sequences, seed)
    check_numbers(text, draws)
    report = progress or _silent
    report("loading", 0, 0)
    options = LoadOptions(
        revision, processes.device(device), device_map, dtype, trust_remote_code, allow_pickle, head=True
    )
    setting, corpus = opened_by_all(model, run, tokenizer, options, text, report, processes)
    if shards is not None and not isinstance(model, str):
        processes.run(setting.checkpoint.identify)
        processes.require_same(setting.checkpoint.facts.get("tensors_sha256"))
    whole = processes.run(lambda: expanded(parsed, setting))
    chosen = whole.arms
    facts = facts_of(setting, corpus) | {
        "arms": [arm.name for arm in chosen],
        "draws": draws,
        "seed": seed,
        "cosines": cosines,
    }
    kept = processes.on_main(
        lambda: None if shards is None else Finished(Path(shards), key_of(facts, setting, chosen), resume)
    )
    measured = measure(setting, chosen, draws, report, kept, processes, cosines)
    left_out = unread(setting.plan, {"status": "skipped"})
    warnings = [*setting.checkpoint.warnings, *corpus.warnings, *whole.missing, *left_out, *setting.plan.failures]
    warnings += _idle(chosen, int(corpus.ids.shape[1]))
    told = [sentence for arm in chosen for sentence in arm.told()]
    return processes.run(lambda: summarise(measured, whole.controls, corpus.documents, facts, warnings, told))


def _idle(arms: Sequence[Arm], tokens: int) -> list[str]:
    """A warning on windows that hide no key of sequences of so many tokens: their loss is the unablated model's."""
    wide = sorted({arm.size for arm in arms if isinstance(arm, Window) and arm.size >= tokens})
    named = ", ".join(map(str, wide))
    return [f"a window of {named} keys hides nothing: sequences have {tokens} tokens (--seq-len)"] if wide else []


@dataclass(frozen=True)
class Expanded:
    """The arms of a measurement with their companions and controls, each once.

    Attributes:
        arms: all of them, made ready.
        controls: the control's name by that of its arm.
        missing: warnings that name the companions and controls that cannot apply, each with its arm.
    """

    arms: list[Arm]
    controls: dict[str, str]
    missing: list[str]


def expanded(arms: Sequence[Arm], setting: Setting, only_counted: bool = False) -> Expanded:
    """The arms, made ready, with their companions and controls.

    `only_counted`: the model has no numbers and no tokenizer; the arms then say how many they are, and cannot be run.
    Raises SinkscopeError where one of `arms` cannot apply, and for an object that takes the name of another arm. A
    companion or control that cannot apply, which nobody asked for by its name, is left out.
    """

    def applicable(arm: Arm) -> Arm:
        with blaming(arm):
            check_run(arm, setting.run)
            return arm if only_counted and arm.reads_tokens else arm.ready(setting)

    ready: dict[str, Arm] = {}
    given: dict[str, Arm] = {}
    missing: list[str] = []
    for arm in arms:
        _take_name(given, arm)
        if arm.name not in ready:
            ready[arm.name] = applicable(arm)
        for companion in arm.companions():
            _take_name(given, companion)
            if companion.name not in ready:
                try:
                    ready[companion.name] = applicable(companion)
                except SinkscopeError as error:
                    missing.append(_missing(arm, "", companion, error))
    if UNABLATED in ready:
        raise SinkscopeError(f"--arm {UNABLATED}: the unablated model is always measured")
    if not only_counted:
        ready = {name: _tried(arm, setting) for name, arm in ready.items()}
    ready = {name: _prepared(arm, setting, only_counted) for name, arm in ready.items()}
    controls = _add_controls(ready, setting, missing)
    return Expanded(list(ready.values()), controls, list(dict.fromkeys(missing)))


def _add_controls(ready: dict[str, Arm], setting: Setting, missing: list[str]) -> dict[str, str]:
    """Adds the controls of the arms that are `ready`, and returns their names by those of their arms. `missing` gets a
    line for each that cannot apply."""
    controls: dict[str, str] = {}
    for name, arm in list(ready.items()):
        control = arm.control()
        if control is None:
            continue
        if control.name not in ready:
            try:
                with blaming(control):
                    ready[control.name] = control.ready(setting)
            except SinkscopeError as error:
                missing.append(_missing(arm, "its random control ", control, error))
                continue
        elif type(ready[control.name]) is not type(control):
            raise _two_arms(control)
        controls[name] = control.name
    return controls


def _take_name(given: dict[str, Arm], arm: Arm) -> None:
    """Files an arm under its name. Raises SinkscopeError where another arm has it: rows are told apart by names."""
    before = given.setdefault(arm.name, arm)
    try:
        same = before is arm or bool(before == arm)
    except (RuntimeError, ValueError):  # of a class of the user's, whose tensors or arrays have no single answer
        same = False
    if not same:
        raise _two_arms(arm)


def _two_arms(arm: Arm) -> SinkscopeError:
    return SinkscopeError(f"--arm {arm.name}: two different arms have this name; give one of them another")


def _tried(arm: Arm, setting: Setting) -> Arm:
    with blaming(arm):
        return arm.tried(setting)


def _prepared(arm: Arm, setting: Setting, only_counted: bool) -> Arm:
    with blaming(arm):
        return arm.foreseen() if only_counted else arm.prepared(setting)


def _missing(arm: Arm, what: str, other: Arm, error: SinkscopeError) -> str:
    """Warns that an arm is measured without another one."""
    reason = str(error).removeprefix(f"--arm {other.name}: ")
    return f"{arm.name} is measured without {what}{other.name} ({reason}): the columns that compare them are empty"


def _silent(stage: str, done: int, total: int) -> None:
    """Shows no progress."""

"""Trains a small language model on sinkscope's built-in text until an attention sink appears, on two CPU cores.

    python examples/train_sink.py --out runs/train-sink

trains the same model three times, from the same weights and on the same batches. Only the extra logit that stands
beside the keys of each attention head differs (`sinks` of transformers' GPT-OSS class):

    softmax   -1e9, which weighs nothing: the weights of a query sum to 1
    softmax1  0: the denominator of the softmax is 1 larger, so that a query may attend to nothing ("off by one")
    learned   a parameter of each head, as in GPT-OSS, which starts at 0

--attention takes two more, without an extra logit and without normalisation: no sum divides a row.

    sigmoid   sigmoid of each logit, divided by nothing
    relu      ReLU of each logit over the position i, and i = 1 for the first token

--seeds N trains each kind with the seeds 0 .. N-1 and compares them in compare.csv and on the screen: loss and sinks
side by side, with the 95 % interval of the mean over seeds. --learning-rate, --weight-decay, --data-share, --optimizer,
--init and --loss-from are what Gu et al. (2410.10781) turn: the last counts the loss from a position on. --knobs turns
each of them alone, and prints one line a training (knobs.csv).

A row is BOS, a stretch of text, and the same stretch again: a head that copies from the first time has nothing to do
there. --plain gives one stretch of the same length instead. Every eighth document is held out; loss and sinks are
measured on rows of those. The folder of each training gets trajectory.csv (by SinkCallback), loss.csv, emergence.csv,
trajectory.png and last-step, a scan of the trained model, which `sinkscope claims` reads. The screen says at which
step, and in which heads, a sink appeared. docs/training.md shows what came out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import t
from transformers import GptOssConfig, GptOssForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sinkscope
from sinkscope.experiments.training.trajectory import emergence
from sinkscope.present.figures.trajectory import draw_trajectory
from sinkscope.present.terminal.trajectory import render_trajectory
from sinkscope.trigger.model import plain_attention

BOS = 256
"""The token ids 0 to 255 are bytes."""
LENGTH = 65
UNCOUNTED = -100
"""A label that the loss of transformers leaves out."""
CORPORA = ("prose", "code", "multilingual")
EXTRA_LOGIT = {"softmax": -1e9, "softmax1": 0.0, "learned": 0.0}
SCORES = ("sigmoid", "relu")
"""Kinds without normalisation, by their names in sinkscope.capture.scores."""
OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd", "muon": "adamw_torch"}
"""By transformers' names. It has no Muon: `MuonBesideAdamW` takes the place of its AdamW."""
BETAS = (0.9, 0.95)
KNOBS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "learning rate 0.0003": {"learning_rate": 3e-4},
    "learning rate 0.01": {"learning_rate": 1e-2},
    "weight decay 0": {"weight_decay": 0.0},
    "weight decay 1": {"weight_decay": 1.0},
    "a tenth of the text": {"data_share": 0.1},
    "a hundredth of the text": {"data_share": 0.01},
    "first weights of 0.005": {"init": 0.005},
    "first weights of 0.1": {"init": 0.1},
    "SGD, rate 0.3": {"optimizer": "sgd", "learning_rate": 0.3},
    "Muon beside AdamW": {"optimizer": "muon"},
    "loss from position 33 on": {"loss_from": 33},
    "rows of one stretch": {"plain": True},
}
"""What is changed in the recipe, one thing at a time."""


@dataclass(frozen=True)
class Recipe:
    """What a training is asked for besides its kind and its seed."""

    steps: int = 800
    every: int = 40
    plain: bool = False
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    data_share: float = 1.0
    optimizer: str = "adamw"
    init: float = 0.02
    loss_from: int = 1


def text_of(held_out: bool) -> list[torch.Tensor]:
    """The bytes of each built-in document; of every eighth one where `held_out`, else of all others."""
    found = []
    for corpus in CORPORA:
        paths = sorted((files("sinkscope") / "data" / corpus).iterdir(), key=lambda path: path.name)
        found += [path.read_bytes() for number, path in enumerate(paths) if (number % 8 == 7) == held_out]
    return [torch.tensor(list(document)) for document in found]


def row(text: torch.Tensor, start: int, plain: bool) -> torch.Tensor:
    """BOS, then the stretch of text at `start`: once, or half of its length twice. LENGTH token ids."""
    length = (LENGTH - 1) if plain else (LENGTH - 1) // 2
    stretch = text[start : start + length]
    return torch.cat([torch.tensor([BOS]), stretch if plain else stretch.repeat(2)])


class Rows(torch.utils.data.Dataset):
    """`count` rows from random places of the first `share` of the training text. The loss counts the tokens from
    position `loss_from` on."""

    def __init__(self, count: int, plain: bool, share: float = 1.0, loss_from: int = 1) -> None:
        text = torch.cat(text_of(held_out=False))
        text = text[: max(LENGTH + 1, round(share * len(text)))]
        starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(0))
        self.rows = [row(text, int(start), plain) for start in starts]
        self.uncounted = torch.arange(LENGTH) < loss_from

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = self.rows[number]
        return {"input_ids": ids, "labels": ids.masked_fill(self.uncounted, UNCOUNTED)}


def small_model(kind: str, seed: int, init: float = 0.02) -> GptOssForCausalLM:
    """Two layers of four heads; one expert, so that each layer has a plain MLP."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=BOS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, num_local_experts=1, num_experts_per_tok=1, attention_bias=False,
        layer_types=["full_attention"] * 2, max_position_embeddings=LENGTH, swiglu_limit=100.0, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=BOS, eos_token_id=BOS,
        initializer_range=init,
    ))  # fmt: skip
    if kind in SCORES:
        use_score(model, kind)
        return model
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(EXTRA_LOGIT[kind])
        layer.self_attn.sinks.requires_grad_(kind == "learned")
    return model


def use_score(model: GptOssForCausalLM, score: str) -> None:
    """Replaces the softmax of every layer by a score, named to the attention function by the keyword `score`."""

    def named(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, given | {"score": score}

    ALL_ATTENTION_FUNCTIONS.register("scored", plain_attention)
    model.config._attn_implementation = "scored"
    for layer in model.model.layers:
        layer.self_attn.sinks = None
        layer.self_attn.register_forward_pre_hook(named, with_kwargs=True)


class MuonBesideAdamW(torch.optim.Optimizer):
    """torch's Muon for the projections of attention, AdamW for all else: embeddings, the head, norms, and the expert,
    whose weights have three axes. Muon's steps are scaled to the size of AdamW's, so that both have one rate."""

    def __init__(self, model: torch.nn.Module, rate: float, decay: float) -> None:
        matrices, others, spared = [], [], []
        for name, weight in model.named_parameters():
            vector = weight.ndim == 1 or name.endswith("bias")  # the Trainer spares these the decay, too
            (spared if vector else matrices if ".self_attn." in name else others).append(weight)
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, weight_decay=decay, betas=BETAS),
            torch.optim.AdamW(spared, lr=rate, weight_decay=0.0, betas=BETAS),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:
        """One step of each, at the rates that the schedule has written into this optimizer's groups."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.step()


def train(kind: str, out: Path, recipe: Recipe, seed: int = 0) -> dict[str, Any]:
    """Trains one model; writes its tables and figure into `out` and prints when its sinks appeared.

    Returns its last loss, the numbers of heads whose alpha_0, and whose mean share of a row's sum, are above 0.3, and
    the means over heads of BOS's attention and its share. An unnormalised weight has no common scale; its share has.
    The loss is that of all positions. `elsewhere` counts heads whose largest alpha_k is above 0.3 at another position
    than BOS's.
    """
    held_out = torch.stack([row(text, 0, recipe.plain) for text in text_of(held_out=True)])
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=recipe.steps, per_device_train_batch_size=16, per_device_eval_batch_size=16,
        learning_rate=recipe.learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=100,
        weight_decay=recipe.weight_decay, optim=OPTIMIZERS[recipe.optimizer], adam_beta2=BETAS[1],
        eval_strategy="steps", eval_steps=recipe.every, eval_on_start=True, logging_steps=recipe.every,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=seed,
    )  # fmt: skip
    callback = sinkscope.SinkCallback(every=recipe.every, data=held_out)
    model = small_model(kind, seed, recipe.init)
    own = MuonBesideAdamW(model, recipe.learning_rate, recipe.weight_decay) if recipe.optimizer == "muon" else None
    trainer = Trainer(
        model, arguments, callbacks=[callback], optimizers=(own, None),
        train_dataset=Rows(16 * recipe.steps, recipe.plain, recipe.data_share, recipe.loss_from),
        eval_dataset=[{"input_ids": ids, "labels": ids} for ids in held_out],
    )  # fmt: skip
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    losses = pd.DataFrame([{"step": entry["step"], "loss": entry["eval_loss"]} for entry in measured])
    trajectory = pd.read_csv(out / "trajectory.csv", dtype={"layer": "Int64", "head": "Int64"})
    emerged = emergence(trajectory, sinkscope.runs.defaults.EPSILON)
    losses.to_csv(out / "loss.csv", index=False)
    emerged.to_csv(out / "emergence.csv", index=False)
    ended = trainer.model.eval()
    sinkscope.scan(ended, data=held_out, measure=("switch", "smoothing"), self_check=False).save(
        out / "last-step", force=True
    )
    (out / "trajectory.png").write_bytes(draw_trajectory(trajectory, "png", losses=losses))
    print(f"\n{kind}: loss {losses['loss'].iloc[0]:.3f} at first, {losses['loss'].iloc[-1]:.3f} at the end")
    print(render_trajectory(trajectory, emerged, sinkscope.runs.defaults.EPSILON, sorted(out.glob("*.*"))))
    heads = callback.run.heads
    shares = callback.run.positions.query("position > 0").groupby(["layer", "head"])["bos_share"].mean()
    epsilon = sinkscope.runs.defaults.EPSILON
    return {
        "attention": kind, "seed": seed, "loss": losses["loss"].iloc[-1],
        "sinks": int((heads["sink_score"] > epsilon).sum()), "share_sinks": int((shares > epsilon).sum()),
        "elsewhere": int(((heads["peak_score"] > epsilon) & (heads["peak_position"] > 0)).sum()),
        "largest": heads["sink_score"].max(), "bos": heads["bos_mass"].mean(), "share": shares.mean(),
    }  # fmt: skip


def compared(table: pd.DataFrame) -> str:
    """One line a kind, in Markdown: means over seeds with 95 % intervals (Student's t), and the range of sinks."""

    def interval(values: pd.Series) -> str:
        if len(values) < 2:
            return f"{values.mean():.3f}"
        half = t.ppf(0.975, len(values) - 1) * values.sem()
        return f"{values.mean():.3f} ({values.mean() - half:.3f} to {values.mean() + half:.3f})"

    names = ["attention", "seeds", "loss", "alpha_0 > 0.3", "share > 0.3", "largest alpha_0", "BOS, raw", "BOS, share"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for kind, rows in table.groupby("attention", sort=False):
        counts = [" to ".join(map(str, sorted({rows[n].min(), rows[n].max()}))) for n in ("sinks", "share_sinks")]
        means = [interval(rows[name]) for name in ("largest", "bos", "share")]
        lines.append("| " + " | ".join([str(kind), str(len(rows)), interval(rows["loss"]), *counts, *means]) + " |")
    return "\n".join(lines)


def turned(table: pd.DataFrame) -> str:
    """One line for each thing that was changed, in Markdown: ranges over seeds."""

    def span(values: pd.Series, digits: int) -> str:
        return " to ".join(dict.fromkeys(f"{each:.{digits}f}" for each in (values.min(), values.max())))

    lines = ["| changed | seeds | loss | alpha_0 > 0.3 | largest alpha_0 | alpha_k > 0.3, k > 0 |", "|" + "---|" * 6]
    for change, rows in table.groupby("changed", sort=False):
        found = [span(rows[name], digits) for name, digits in SHOWN]
        lines.append("| " + " | ".join([str(change), str(len(rows)), *found]) + " |")
    return "\n".join(lines)


SHOWN = (("loss", 3), ("sinks", 0), ("largest", 3), ("elsewhere", 0))
"""Columns of compare.csv that `turned` shows, and their digits."""


def turn_knobs(recipe: Recipe, kinds: list[str], seeds: list[int], out: Path) -> pd.DataFrame:
    """Trains each kind and seed once for each of KNOBS; the table grows in knobs.csv."""
    rows = []
    for (change, changes), kind, seed in product(KNOBS.items(), kinds, seeds):
        folder = out / f"{change.replace(' ', '-')}-{kind}-seed{seed}"
        rows.append({"changed": change} | train(kind, folder, replace(recipe, **changes), seed))
        pd.DataFrame(rows).to_csv(out / "knobs.csv", index=False)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/train-sink"), help="folder for the results")
    parser.add_argument("--attention", choices=[*EXTRA_LOGIT, *SCORES], action="append", help="train this one only")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=40, help="steps between two measurements")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the rows")
    parser.add_argument("--seeds", type=int, help="train each kind with the seeds 0 .. N-1", metavar="N")
    parser.add_argument("--plain", action="store_true", help="rows of one stretch of text, not twice the same")
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=Recipe.weight_decay)
    parser.add_argument("--data-share", type=float, default=1.0, help="train on this share of the text")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--init", type=float, default=Recipe.init, help="standard deviation of the first weights")
    parser.add_argument("--loss-from", type=int, default=1, help="count the loss from this position on", metavar="N")
    parser.add_argument("--knobs", action="store_true", help="change one thing of the recipe at a time")
    given = parser.parse_args()
    recipe = Recipe(**{each.name: getattr(given, each.name) for each in fields(Recipe)})
    seeds, kinds = [given.seed] if given.seeds is None else list(range(given.seeds)), given.attention or [*EXTRA_LOGIT]
    if given.knobs:
        table = turn_knobs(recipe, kinds, seeds, given.out)
        for kind, own in table.groupby("attention", sort=False):
            print(f"\n{kind}\n{turned(own)}")
        return
    rows = []
    for seed in seeds:
        for kind in kinds:
            folder = given.out / kind if given.seeds is None else given.out / f"{kind}-seed{seed}"
            rows.append(train(kind, folder, recipe, seed))
            pd.DataFrame(rows).to_csv(given.out / "compare.csv", index=False)
    print(f"\n{compared(pd.DataFrame(rows))}")


if __name__ == "__main__":
    main()

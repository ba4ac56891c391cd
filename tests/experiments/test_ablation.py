"""Zeroed heads and the measured loss, against transformers' own loss, weights zeroed by hand, and plain statistics."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import corpus_texts, make_model, make_tokenizer
from models import random_ids, tiny
from scipy import stats
from tiers import nightly, slow_but
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from typer.testing import CliRunner, Result
from watched import find, hooks

import sinkscope
from sinkscope.cli.scan_job import unfinished_folder
from sinkscope.experiments.arms.changes import zeroed
from sinkscope.experiments.arms.head_choice import HeadTable, Score, read_fractions, read_score, read_scored
from sinkscope.experiments.arms.readings import Reference, next_token_losses
from sinkscope.runs.saved.ablation import HIDDEN, RANDOM, summarise
from sinkscope.runs.saved.ablation import ZeroedArm as Arm
from sinkscope.runs.saved.arms_table import UNABLATED, beside_random, versus_random
from sinkscope.runs.statistics import Difference

FILES = {"ablation.csv", "losses.csv", "arms.csv", "ablation.json", "ablation.png", "ablation.svg"}
SMALL = {"num_sequences": 3, "seq_len": 24, "draws": 2}


def causal(family: str) -> Any:
    """A tiny random causal language model whose biases are not 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family).config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run of `tiny_folder` over 20 of prose's documents. Shared: leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    sinkscope.scan(str(tiny_folder), seq_len=24, num_sequences=20, self_check=False).save(folder)
    return folder


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., Result]:
    """`sinkscope ablate MODEL --run RUN ARGUMENTS --out tmp/ablation`, small unless told otherwise."""

    def run(model: object, run: object, *args: object) -> Result:
        from sinkscope.cli import app

        words = [str(word) for word in args]
        for option, value in (("--num-sequences", "3"), ("--seq-len", "24"), ("--draws", "2"), ("--fraction", "0.25")):
            words += [] if option in words else [option, value]
        if "--out" not in words:
            words += ["--out", str(tmp_path / "ablation")]
        return CliRunner().invoke(app, ["ablate", str(model), "--run", str(run), *words])

    return run


# What is done to the model


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gpt_neox", "qwen3", "gemma2"], "llama", "gpt2"))
@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [2]])
def test_zeroed_heads_are_zeroed_columns_of_the_projection(family: str, heads: list[int]) -> None:
    """All heads of a layer: the projection's weights are 0 and its bias stays. One head: its columns."""
    model, by_hand, ids = causal(family), causal(family), random_ids(2, 20)
    _, found = find(model.base_model)
    site = found.sites[1]
    weight = by_hand.base_model.get_submodule(site.projection).weight
    with torch.no_grad():
        rows = weight if family == "gpt2" else weight.T  # Conv1D keeps [in, out]
        for head in heads:
            rows[head * site.value_dim : (head + 1) * site.value_dim] = 0.0
        with zeroed(model.base_model, found.sites, {site.name: heads}):
            ours = model(ids).logits
        torch.testing.assert_close(ours, by_hand(ids).logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(ours, model(ids).logits, atol=1e-3)


def test_nothing_stays_after_an_exception() -> None:
    model = causal("llama")
    _, found = find(model.base_model)
    before = hooks(model)
    with pytest.raises(RuntimeError, match="stop"), zeroed(model.base_model, found.sites, {found.sites[0].name: [1]}):
        assert hooks(model) == before + 1
        raise RuntimeError("stop")
    assert hooks(model) == before


# The loss


def own_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return Reference(logits, ids).compare(logits)["loss"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_loss_is_transformers_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = causal(family), random_ids(5, 33)
    with torch.no_grad():
        expected = [float(model(row[None], labels=row[None]).loss) for row in ids]
        logits = model(ids).logits
    np.testing.assert_allclose(own_losses(logits, ids), expected, rtol=1e-6)
    monkeypatch.setattr("sinkscope.experiments.arms.readings.CHUNK_BYTES", 4 * 97 * 5 * 7)  # 7 positions at a time
    np.testing.assert_allclose(own_losses(logits, ids), expected, rtol=1e-6)
    monkeypatch.setattr("sinkscope.experiments.arms.readings.CHUNK_BYTES", 4 * 97 * 5 * 8)  # no token follows the last
    np.testing.assert_allclose(own_losses(logits, ids), expected, rtol=1e-6)


def test_half_precision_logits_are_summed_in_float32() -> None:
    ids = random_ids(2, 300)
    logits = torch.randn(2, 300, 97).bfloat16()
    exact = [
        torch.nn.functional.cross_entropy(row[:-1].double(), own[1:]) for row, own in zip(logits, ids, strict=True)
    ]
    np.testing.assert_allclose(own_losses(logits, ids), torch.stack(exact), rtol=1e-6)


# The experiment


def test_nothing_zeroed_is_the_unablated_model_exactly(tiny_folder: Path, tiny_run: Path) -> None:
    result = sinkscope.ablate(str(tiny_folder), tiny_run, fractions=[0.0, 1.0], **SMALL)
    rows = result.table.set_index(["arm", "fraction"])
    losses = result.losses.groupby(["arm", "fraction"], dropna=False)["loss"].apply(list)
    assert losses["honor:low", 0.0] == losses.loc[UNABLATED].iloc[0]
    assert rows.loc[("honor:low", 0.0), "increase"] == 0
    assert rows.loc[("honor:low", 0.0), "heads"] == 0
    assert result.words[0] == "honor:low at 0 % (0 heads): loss +0.0000, nothing zeroed."
    assert not result.heads["honor:low"].keys() - {"1"}
    everything = rows.loc[("honor:low", 1.0)]
    assert everything["heads"] == 8
    assert everything["versus_random"] == 0  # all heads, however they were chosen
    assert everything["increase"] != 0
    assert "costs the same as random heads, up to rounding" in result.words[1]


def test_both_tables_of_an_ablation_say_the_same(tiny_folder: Path, tiny_run: Path) -> None:
    """ablation.csv and arms.csv: of the unablated model, of a share of no heads, and of all others."""
    result = sinkscope.ablate(str(tiny_folder), tiny_run, fractions=[0.0, 0.5], tokens="first", **SMALL)
    columns = [
        *("loss", "loss_sem", "increase", "increase_sem", "increase_p"),
        *("versus_random", "versus_random_sem", "versus_random_p", "spread"),
    ]
    names = [UNABLATED, "heads:honor:low0%", "heads:random0", "heads:honor:low50%", "heads:random4", "keys:first1"]
    own, arms = result.table[columns], result.arms.set_index("arm").loc[names, columns]
    np.testing.assert_array_equal(own.to_numpy(float), arms.to_numpy(float))
    unablated, none = own.iloc[0], own.iloc[1]
    assert unablated[["increase", "increase_sem", "increase_p"]].tolist() == [0, 0, 1]
    assert none[["versus_random", "versus_random_sem", "versus_random_p"]].isna().all()


def test_text_is_text_the_run_has_not_read(tiny_folder: Path, tiny_run: Path) -> None:
    result = sinkscope.ablate(str(tiny_folder), tiny_run, fractions=[0.25], num_sequences=100, draws=2)
    read = json.loads((tiny_run / "manifest.json").read_text())["data"][0]["documents"]
    names = {name for joined in result.facts["data"]["documents"] for name in joined.split(" + ")}
    assert names
    assert not names & {name for joined in read for name in joined.split(" + ")}
    assert result.facts["data"]["seq_len"] == 24
    assert len(result.losses["sequence"].unique()) == len(corpus_texts("prose")) - len(read)
    assert any("the data hold no more" in warning for warning in result.warnings)


def test_the_heads_that_were_zeroed_have_the_lowest_score(tiny_folder: Path, tiny_run: Path) -> None:
    result = sinkscope.ablate(
        str(tiny_folder), tiny_run, scores=["honor", "bos_mass", "q_norm:low"], fractions=[0.25, 0.5], **SMALL
    )
    heads = sinkscope.load_run(tiny_run).heads
    for column, ascending, name in (
        ("honor", True, "honor:low"), ("bos_mass", False, "bos_mass:high"), ("q_norm", True, "q_norm:low")
    ):  # fmt: skip
        ordered = heads.sort_values(column, ascending=ascending)
        for fraction, count in ((0.25, 2), (0.5, 4)):
            expected = {(row.module, row.head) for row in ordered.head(count).itertuples()}
            assert {tuple(pair) for pair in result.heads[name][f"{fraction:g}"]} == expected


def test_a_model_object_and_all_of_the_first_token(tiny_model: Any, tokenizer: Any) -> None:
    run = sinkscope.scan(tiny_model, tokenizer=tokenizer, seq_len=24, num_sequences=4, self_check=False, epsilon=0.2)
    before = hooks(tiny_model)
    result = sinkscope.ablate(tiny_model, run, fractions=[0.25], tokens="first", tokenizer=tokenizer, **SMALL)
    rows = result.table.set_index("arm")
    assert hooks(tiny_model) == before
    assert rows.loc[HIDDEN, "sink_rate_first"] == 0
    assert 0 < rows.loc[UNABLATED, "sink_rate_first"] < rows.loc[UNABLATED, "sink_rate_any"] < 1
    assert 0 < rows.loc[HIDDEN, "sink_rate_any"] < rows.loc[UNABLATED, "sink_rate_any"], "some sinks move elsewhere"
    assert rows["sink_rate_any"].notna().sum() == 2
    assert rows.loc[HIDDEN, "increase"] == pytest.approx(rows.loc[HIDDEN, "loss"] - rows.loc[UNABLATED, "loss"])
    assert result.words[-1].startswith("First token hidden")


def test_a_score_that_is_named_twice_is_one_arm(tiny_folder: Path, tiny_run: Path) -> None:
    """And fractions of as many heads share their random draws, which an error over draws must not count twice."""
    result = sinkscope.ablate(
        str(tiny_folder), tiny_run, scores=["honor", "honor:low"], fractions=[0.25, 0.26], **SMALL
    )
    assert result.table["arm"].tolist() == [UNABLATED, "honor:low", RANDOM, "honor:low", RANDOM]
    assert result.facts["scores"] == ["honor:low"]
    assert result.arms.set_index("arm")["draws"].to_dict() == {
        UNABLATED: 1, "heads:honor:low25%": 1, "heads:random2": 2, "heads:honor:low26%": 1,
    }  # fmt: skip


# Choosing


def table_of(values: list[float]) -> HeadTable:
    number = np.arange(len(values))
    modules = [f"layers.{layer}" for layer in number // 4]
    return HeadTable(
        pd.DataFrame({"stream": "text", "layer": number // 4, "module": modules, "head": number % 4, "honor": values})
    )


def test_random_draws_hold_the_smaller_ones_and_differ() -> None:
    heads = table_of([1.0] * 40)

    def flat(count: int, seed: int, draw: int = 0) -> frozenset[tuple[str, int]]:
        return frozenset((module, head) for module, own in heads.drawn(count, seed, draw).items() for head in own)

    assert flat(4, 0) < flat(10, 0)
    assert len(flat(10, 0)) == 10
    assert len({flat(10, seed, draw) for seed in range(5) for draw in range(5)}) == 25, "no two seeds share a draw"
    assert flat(40, 3) == flat(40, 4)


def test_a_head_without_a_score_is_never_chosen() -> None:
    heads = table_of([float("nan"), 3.0, 1.0, 2.0])
    assert heads.dormant(Score("honor", True), 2) == {"layers.0": [2, 3]}
    assert heads.dormant(Score("honor", False), 1) == {"layers.0": [1]}
    with pytest.raises(sinkscope.SinkscopeError, match="only 3 of 4 heads have a value"):
        heads.dormant(Score("honor", True), 4)


@pytest.mark.parametrize(
    ("percent", "heads", "count"),
    [("29", 50, 15), ("57", 50, 29), ("14.5", 100, 15), ("58", 25, 15), ("28.9", 50, 14), ("5", 72, 4), ("100", 7, 7)],
)
def test_a_share_is_rounded_with_halves_up(percent: str, heads: int, count: int) -> None:
    """By its decimal digits: the float product of a half lies below it, or above."""
    assert int(Fraction(percent) / 100 * heads + Fraction(1, 2)) == count
    assert table_of([1.0] * heads).count(read_scored(f"honor:{percent}%")[1]) == count


def test_ends_of_scores() -> None:
    expected = {"honor": "low", "awft_ln": "high", "ftvvn_ln": "low", "bos_mass": "high", "q_norm:high": "high"}
    for text, end in expected.items():
        assert read_score(text).name == f"{text.partition(':')[0]}:{end}"
    assert read_fractions("0.2,0.05,0.2") == [0.05, 0.2]


# The statistics


def test_what_random_draws_do_not_show_is_said_with_its_interval_and_the_sample_that_could_tell() -> None:
    generator = np.random.default_rng(0)
    control = generator.normal(size=(4, 9))
    losses = control.mean(0) + generator.normal(size=9)
    gap = versus_random(losses, control)
    assert gap.p > 0.05
    said = beside_random(gap, control.shape, "random heads")
    assert said.startswith(
        f"cannot be told from random (against random heads: 95 % interval {gap.low:+.4f} to {gap.high:+.4f}, p = "
    )
    factor = (2.8 * gap.sem / gap.difference) ** 2
    sample = f"{math.ceil(9 * factor)} sequences and {math.ceil(4 * factor)} draws"
    assert said.endswith(
        f"about {sample} could tell a difference of this size)"
        if factor <= 100
        else "more than 100 times the sequences and draws would be needed to tell)"
    )
    assert beside_random(versus_random(losses + 9, control), control.shape, "random heads").startswith(
        "costs MORE than random ("
    )


def test_as_many_sequences_and_draws_as_named_tell_the_difference_four_times_in_five() -> None:
    generator = np.random.default_rng(1)
    effect, draws, sequences = 0.4, 16, 49
    found = 0
    for _ in range(400):
        control = generator.normal(0, 1e-6, (draws, sequences))
        found += versus_random(effect + generator.normal(size=sequences), control).p < 0.05
    gap = Difference(*map(np.asarray, (0.0, effect, effect, 0.3, -0.3, 1.1, 0.26)))
    assert beside_random(gap, (3, 9), "r").endswith(
        "about 40 sequences and 14 draws could tell a difference of this size)"
    )
    assert 0.72 < found / 400 < 0.88


def test_draws_of_the_very_same_heads_are_no_difference() -> None:
    """The mean of six equal losses may be off by their last bit, and was significantly so."""
    generator = np.random.default_rng(0)
    for _ in range(500):
        losses = generator.uniform(2, 6, 16)
        gap = versus_random(losses, np.repeat(losses[None], 6, 0))
        assert float(gap.p) == 1.0
        assert beside_random(gap, (6, 16), "random heads") == "costs the same as random heads, up to rounding"


def test_versus_random_joins_both_errors() -> None:
    draw = np.random.default_rng(0)
    losses, control = draw.normal(3.0, 0.1, 12), draw.normal(3.2, 0.1, (5, 12))
    found = versus_random(losses, control)
    paired = losses - control.mean(0)
    sequences, draws = paired.std(ddof=1) / np.sqrt(12), control.mean(1).std(ddof=1) / np.sqrt(5)
    assert float(found.difference) == pytest.approx(losses.mean() - control.mean())
    assert float(found.sem) == pytest.approx(np.hypot(sequences, draws))
    freedom = (sequences**2 + draws**2) ** 2 / (sequences**4 / 11 + draws**4 / 4)
    expected = 2 * stats.t.sf(abs(float(found.difference)) / np.hypot(sequences, draws), freedom)
    assert float(found.p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shift", "verdict"), [(-0.5, "costs less than"), (0.5, "costs MORE than"), (0.0, "cannot be told from")]
)
def test_words(shift: float, verdict: str) -> None:
    draw = np.random.default_rng(1)
    base = draw.normal(3.0, 0.3, 10)
    arms = [Arm(UNABLATED, losses=base), Arm("honor:low", 0.1, heads={"a": [0]}, losses=base + 0.6 + shift)]
    arms += [Arm(RANDOM, 0.1, n, {"a": [n]}, base + 0.6 + draw.normal(0, 0.05, 10)) for n in range(4)]
    result = summarise(arms, [f"text {n}" for n in range(10)], {}, [])
    assert result.words[0].startswith("honor:low at 10 % (1 head): loss +")
    assert verdict in result.words[0]
    rows = result.table.set_index("arm")
    random = np.stack([arm.losses for arm in arms[2:]])
    assert rows.loc[RANDOM, "loss"] == pytest.approx(random.mean())
    assert rows.loc[RANDOM, "spread"] == pytest.approx(random.mean(1).std(ddof=1))
    assert rows.loc[RANDOM, "increase_sem"] == pytest.approx((random.mean(0) - base).std(ddof=1) / np.sqrt(10))
    assert rows.loc["honor:low", "increase"] == pytest.approx(0.6 + shift)
    assert len(result.losses) == 60


# The command


@pytest.mark.slow
def test_command_writes_a_folder(
    tiny_folder: Path, tiny_run: Path, run_cli: Callable[..., Result], tmp_path: Path
) -> None:
    done = run_cli(tiny_folder, tiny_run, "--score", "honor", "--score", "bos_mass", "--tokens", "first")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in (tmp_path / "ablation").iterdir()} == FILES
    for part in ("unablated", "honor:low 25 %", "bos_mass:high 25 %", "random 25 % (2 draws)", "first token hidden"):
        assert part in done.stdout
    saved = json.loads((tmp_path / "ablation" / "ablation.json").read_text())
    table = pd.read_csv(tmp_path / "ablation" / "ablation.csv")
    assert 0 < done.stdout.index(saved["in_words"][0][:20]) < done.stdout.index("increase"), "the answer stands on top"
    assert [row["arm"] for row in saved["table"]] == table["arm"].tolist()
    assert table["loss"].to_numpy() == pytest.approx([row["loss"] for row in saved["table"]])
    first = {path.name: path.read_bytes() for path in (tmp_path / "ablation").iterdir() if path.suffix != ".json"}
    refused = run_cli(tiny_folder, tiny_run)
    assert refused.exit_code == 2
    assert "holds a finished ablation: --force" in refused.stderr
    again = run_cli(
        tiny_folder, tiny_run, "--score", "honor", "--score", "bos_mass", "--tokens", "first", "--force", "--json"
    )
    assert json.loads(again.stdout)["table"] == saved["table"]
    assert {name: (tmp_path / "ablation" / name).read_bytes() for name in first} == first


def test_ctrl_c_after_the_last_pass_says_what_is_kept(
    tiny_folder: Path, tiny_run: Path, run_cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupting(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sinkscope.Ablation, "save", interrupting)
        stopped = run_cli(tiny_folder, tiny_run)
    assert stopped.exit_code == 130
    kept = f"what is measured is kept in {tmp_path / 'ablation'}"
    assert stopped.stderr.endswith(f"sinkscope: interrupted: {kept}; --resume goes on\n")
    assert run_cli(tiny_folder, tiny_run, "--resume").exit_code == 0


@pytest.mark.slow
def test_an_interrupted_ablation_goes_on(
    tiny_folder: Path, tiny_run: Path, run_cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.experiments.arms.engine.batch_size", lambda model, length: 1)
    whole = sinkscope.ablate(str(tiny_folder), tiny_run, fractions=[0.25], **SMALL)
    calls = 0
    original = next_token_losses

    def stop(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # four passes a sequence: within the second one
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr("sinkscope.experiments.arms.readings.next_token_losses", stop)
        stopped = run_cli(tiny_folder, tiny_run)
    assert stopped.exit_code == 130
    folder = tmp_path / "ablation"
    assert f"interrupted: 1 sequence is measured and kept in {folder}; --resume goes on" in stopped.stderr
    refuse(run_cli(tiny_folder, tiny_run), "holds an unfinished ablation: --resume goes on with it")
    refuse(run_cli(tiny_folder, tiny_run, "--fraction", "0.5", "--resume"), "measurement with another arms")
    done = run_cli(tiny_folder, tiny_run, "--resume")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == FILES
    losses = pd.read_csv(folder / "losses.csv", dtype={"draw": "Int64"})
    pd.testing.assert_frame_equal(losses, whole.losses, check_dtype=False, rtol=1e-8)


def test_the_folder_that_is_resumed_is_the_last_unfinished_one(tmp_path: Path) -> None:
    base = tmp_path / "model-ablation"
    assert unfinished_folder(base) == base
    for name in ("model-ablation", "model-ablation-2", "model-ablation-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ablation.json").touch()
    (tmp_path / "model-ablation-2" / "shards").mkdir()
    assert unfinished_folder(base) == tmp_path / "model-ablation-2"
    shutil.rmtree(tmp_path / "model-ablation-2" / "shards")
    assert unfinished_folder(base) == tmp_path / "model-ablation-4"


def wrong(name: str, error: str) -> Any:
    return pytest.param(name.split(), error, id=name)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        wrong("--score nonesuch:low", "is no score of the run's heads"),
        wrong("--score pattern:low", "is no score of the run's heads"),
        wrong("--score honor_sem:low", "is no score of the run's heads"),
        wrong("--score qk_cos_first", "are heads dormant where it is low or where it is high? write qk_cos_first:low"),
        wrong("--score nonesuch", "--score 'nonesuch': sinkscope has no such column"),
        wrong("--score bosmass", "did you mean bos_mass"),
        wrong(
            "--score bos_mas:high",
            "is no score of the run's heads; `sinkscope metrics` lists the columns; did you mean",
        ),
        wrong("--score distant_write", "is no score of the run's heads: scan it with --measure streaming"),
        wrong("--score honor:lowest", "write NAME, NAME:low or NAME:high"),
        wrong("--fraction 1.5", "a share of the heads between 0 and 1"),
        wrong("--fraction nan", "a share of the heads between 0 and 1"),
        wrong("--fraction some", "shares of the heads, e.g. 0.05,0.1,0.2"),
        wrong("--fraction 0.01", "--fraction: 0.01 of 8 heads is no head"),
        wrong("--tokens last", "one of first"),
        wrong("--draws 1", "needs at least 2 draws"),
        wrong("--draws 1000000000000", "at most 1,000"),
        wrong("--num-sequences 1", "at least 2"),
        wrong("--seed -1", "0 or more"),
        wrong("--seq-len 0", "at least 2"),
        wrong("--seq-len 513", "exceeds the 512 positions"),
        wrong("--data nonesuch", "nonesuch"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], error: str, tiny_folder: Path, tiny_run: Path, run_cli: Callable[..., Result], tmp_path: Path
) -> None:
    refuse(run_cli(tiny_folder, tiny_run, *arguments), error)
    assert not (tmp_path / "ablation").exists()


def refuse(done: Result, error: str) -> None:
    assert done.exit_code == 2, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert error in lines[0]
    assert "unexpected" not in lines[0]


def test_a_run_of_another_model(tiny_run: Path, run_cli: Callable[..., Result], tokenizer: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_model(num_hidden_layers=3).save_pretrained(other)
    tokenizer.save_pretrained(other)
    refuse(run_cli(other, tiny_run), f"whose weights are not those of {other}: scan this model first")


@pytest.mark.slow
def test_no_run_and_nothing_left_to_read(tiny_folder: Path, run_cli: Callable[..., Result], tmp_path: Path) -> None:
    refuse(run_cli(tiny_folder, tmp_path), "is not a run folder")
    text = tmp_path / "mine.jsonl"
    text.write_text("\n".join(json.dumps({"text": each}) for each in corpus_texts("prose")[:4]))
    sinkscope.scan(str(tiny_folder), data=str(text), seq_len=24, num_sequences=4, self_check=False).save(
        tmp_path / "all"
    )
    refuse(run_cli(tiny_folder, tmp_path / "all", "--data", text), "the run has read it all")
    texts(text, corpus_texts("prose")[:5])
    refuse(run_cli(tiny_folder, tmp_path / "all", "--data", text), "one sequence is left; a loss with its error needs")


@pytest.mark.slow
def test_windows_of_a_long_text_that_the_run_did_not_read(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("\n\n".join(corpus_texts("prose")[:3]))
    run = sinkscope.scan(str(tiny_folder), data=str(text), seq_len=24, num_sequences=4, self_check=False)
    result = sinkscope.ablate(str(tiny_folder), run, fractions=[0.25], data=str(text), num_sequences=3, draws=2)
    assert result.facts["data"]["documents"] == ["long.txt[4]", "long.txt[5]", "long.txt[6]"]
    options: dict[str, Any] = {"fractions": [0.25], "num_sequences": 2, "draws": 2}
    other = sinkscope.ablate(str(tiny_folder), run, data=str(text), seq_len=20, **options)
    assert other.facts["data"]["documents"] == ["long.txt[5]", "long.txt[6]"]  # 96 tokens were read


def texts(path: Path, documents: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": each}) for each in documents), "utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["plain.jsonl", "a + b.jsonl"], "a + b.jsonl"))
@pytest.mark.parametrize("bos", slow_but(["auto", ["always", "never"]], ["always", "never"]))
def test_the_loss_is_measured_on_documents_that_the_run_has_not_read(
    name: str, bos: str | list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    """Whatever the file is called, however often the run has read it, and under any other file name."""
    known, unknown = corpus_texts("prose")[:3], corpus_texts("code")[:3]
    read = texts(tmp_path / name, known)
    run = sinkscope.scan(str(tiny_folder), data=str(read), bos=bos, seq_len=24, num_sequences=3, self_check=False)
    run.save(tmp_path / "run")
    mixed = texts(tmp_path / "mixed.jsonl", [*known, *unknown])
    options: dict[str, Any] = {"fractions": [0.25], "num_sequences": 3, "draws": 2}
    result = sinkscope.ablate(str(tiny_folder), tmp_path / "run", data=str(mixed), **options)
    assert result.facts["data"]["documents"] == [f"mixed.jsonl:{line}" for line in (4, 5, 6)]
    with pytest.raises(sinkscope.SinkscopeError, match="the run has read it all"):
        sinkscope.ablate(str(tiny_folder), tmp_path / "run", data=str(read), **options)


def test_a_run_of_0_1_tells_names_alone(tiny_folder: Path) -> None:
    """Of a run of two --bos, 0.1 looked for `prose` among `prose bos=always`, and found nothing to leave out."""
    old = sinkscope.load_run(Path(__file__).parents[1] / "fixtures" / "v0_1" / "two-bos")
    read = {name for data in old.manifest.data for name in data.documents}
    options: dict[str, Any] = {"fractions": [0.25], "num_sequences": 16, "draws": 2}
    result = sinkscope.ablate(make_model(), old, tokenizer=make_tokenizer(), data="prose", **options)
    assert not read & set(result.facts["data"]["documents"])


def test_the_sequences_of_a_run_of_0_1_are_known_under_other_names(tmp_path: Path) -> None:
    old = sinkscope.load_run(Path(__file__).parents[1] / "fixtures" / "v0_1" / "two-bos")
    names = sorted(entry.name for entry in (files("sinkscope") / "data" / "prose").iterdir())
    numbers = [int(name.partition("-")[0]) for name in old.manifest.data[0].documents]
    places = [next(place for place, name in enumerate(names) if int(name.partition("-")[0]) == n) for n in numbers]
    renamed = texts(tmp_path / "mine.jsonl", [corpus_texts("prose")[place] for place in places])
    options: dict[str, Any] = {"fractions": [0.25], "num_sequences": 3, "draws": 2}
    with pytest.raises(
        sinkscope.SinkscopeError, match="these are the very sequences the run read; give another --seed"
    ):
        sinkscope.ablate(make_model(), old, tokenizer=make_tokenizer(), data=str(renamed), **options)


@pytest.mark.parametrize("nothing", [{"scores": []}, {"fractions": []}])
def test_nothing_to_zero(nothing: dict[str, list[Any]], tiny_folder: Path, tiny_run: Path) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="nothing to zero: at least one score and one fraction"):
        sinkscope.ablate(str(tiny_folder), tiny_run, **nothing, **SMALL)


def test_models_that_do_not_predict_the_next_token(
    tiny_run: Path, run_cli: Callable[..., Result], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=97)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "masked")
    refuse(run_cli(tmp_path / "masked", tiny_run), "is not a causal language model (BertForMaskedLM)")
    refuse(run_cli("example:trigger-softmax", tiny_run), "is not a causal language model")
    with pytest.raises(sinkscope.SinkscopeError, match="LlamaModel is not a causal language model"):
        sinkscope.ablate(make_model().model, tiny_run, fractions=[0.25])


def test_somebody_s_files_are_left_alone(
    tiny_folder: Path, tiny_run: Path, run_cli: Callable[..., Result], tmp_path: Path
) -> None:
    shutil.copytree(tiny_run, tmp_path / "ablation")
    before = sorted(path.name for path in (tmp_path / "ablation").iterdir())
    refuse(run_cli(tiny_folder, tiny_run, "--force"), "holds files that are not an ablation's")
    assert sorted(path.name for path in (tmp_path / "ablation").iterdir()) == before


@pytest.mark.slow
@pytest.mark.real
@nightly
def test_gemma_honor_beside_random_heads() -> None:
    """Zeroing by BOS mass costs Gemma-3-270M far more than zeroing as many random heads; HONOR does not."""
    run = sinkscope.scan("example:gemma-3-270m", seq_len=64, num_sequences=4, self_check=False)
    result = sinkscope.ablate(
        "example:gemma-3-270m", run, scores=["honor", "bos_mass"], fractions=[0.1], num_sequences=4, draws=3
    )
    rows = result.table.set_index("arm")
    assert 2 < rows.loc[UNABLATED, "loss"] < 5
    assert rows.loc["bos_mass:high", "versus_random"] > 4 * rows.loc["bos_mass:high", "versus_random_sem"]
    assert rows.loc["honor:low", "loss"] < rows.loc["bos_mass:high", "loss"]
    assert result.words[1].startswith("bos_mass:high at 10 % (7 heads)")
    assert "costs MORE than random" in result.words[1]

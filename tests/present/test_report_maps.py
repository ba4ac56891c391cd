"""Attention maps in the report: their cells, their rows as text, their size, and the command that asks for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import enlarged, scanned
from markupsafe import escape
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.cli.report import TEXT
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.attention_map import HeadMap, attention_maps
from sinkscope.present.figures.maps import gallery_heads
from sinkscope.present.html.attention import LEVELS, MOST_HEADS, MOST_TOKENS, AttentionMaps, attention_view
from sinkscope.present.html.report import render_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[1m"


def causal(length: int, seed: int = 0) -> np.ndarray:
    weights = np.tril(np.random.default_rng(seed).uniform(0, 1, (length, length)) ** 8 + 1e-6)
    return np.asarray(weights / weights.sum(1, keepdims=True))


def map_of(weights: np.ndarray, tokens: list[str] | None = None, head: int = 1) -> HeadMap:
    return HeadMap(2, head, weights, tokens or [f"t{place}" for place in range(len(weights))])


def strokes(svg: str) -> np.ndarray:
    """The level of every cell that a drawing shows, -1 where it shows none."""
    length = int(re.findall(r'viewBox="0 0 (\d+)', svg)[0])
    levels = np.full((length, length), -1)
    for number, path in enumerate(re.findall(r'<path stroke="[^"]+" d="([^"]+)"', svg)):
        for start, query, width in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path):
            row = levels[int(query), int(start) : int(start) + int(width)]
            assert (row == -1).all(), "no cell is drawn twice"
            row[:] = number
    return levels


@pytest.mark.parametrize("seen", ["causal", "both ways"])
def test_every_cell_is_drawn_once_and_known_to_the_script(seen: str) -> None:
    weights = causal(17) if seen == "causal" else causal(17)[:, ::-1].copy()
    drawn = attention_view(scanned(), AttentionMaps("a", [map_of(weights)]))
    (shown,), (known,) = drawn.view["maps"], drawn.weights
    levels, expected = strokes(shown["svg"]), np.rint(weights * (LEVELS - 1))
    hidden = np.triu(np.ones_like(weights, bool), 1) & (seen == "causal")
    assert (levels[hidden] == -1).all()
    order = np.unique(expected[~hidden])
    assert (order[levels[~hidden]] == expected[~hidden]).all()
    for query, row in enumerate(known["weights"]):
        assert len(row) == (query + 1 if seen == "causal" else 17)
        assert np.array(row) * 1e-4 == pytest.approx(weights[query, : len(row)], abs=0.5e-4)


def test_rows_name_the_keys_with_the_most_attention() -> None:
    weights = np.array([[1, 0, 0], [0.9, 0.1, 0], [0.02, 0.34, 0.64]])
    drawn = attention_view(scanned(), AttentionMaps("a", [map_of(weights, ["<bos>", "\u2581the", "\u0120cat"])]))
    (shown,) = drawn.view["maps"]
    assert shown["rows"] == [
        ("0 \u2018<bos>\u2019", "0 \u2018<bos>\u2019 1.00"),
        ("1 \u2018 the\u2019", "0 \u2018<bos>\u2019 0.90, 1 \u2018 the\u2019 0.10"),
        ("2 \u2018 cat\u2019", "2 \u2018 cat\u2019 0.64, 1 \u2018 the\u2019 0.34"),
    ]
    assert shown["caption"].endswith("sinks (alpha_k > 0.3): 0 \u2018<bos>\u2019")
    flat = attention_view(scanned(), AttentionMaps("a", [map_of(np.full((30, 30), 1 / 30))]))
    assert flat.view["maps"][0]["rows"][0][1] == "no key has 0.05 or more"


def test_tokens_and_the_text_stay_text() -> None:
    run = scanned()
    text = render_report([run], None, (), [AttentionMaps(EVIL, [map_of(causal(2), [EVIL, "b"])])])
    assert "<img" not in text
    assert "\x1b" not in text
    assert text.count("<script") == 4
    assert str(escape("<img src=x onerror=alert(1)>")) in text


def test_too_much_is_refused() -> None:
    run = scanned()
    with pytest.raises(SinkscopeError, match=f"at most {MOST_TOKENS} tokens, and the text has {MOST_TOKENS + 1}"):
        attention_view(run, AttentionMaps("a", [map_of(causal(MOST_TOKENS + 1))]))
    with pytest.raises(SinkscopeError, match=f"at most {MOST_HEADS} attention maps"):
        attention_view(run, AttentionMaps("a", [map_of(causal(2))] * (MOST_HEADS + 1)))


@pytest.mark.slow
def test_a_report_of_a_thousand_heads_and_eight_maps_stays_below_a_megabyte() -> None:
    run = enlarged(scanned(), 32, 32, sequences=8)
    maps = [
        map_of(causal(MOST_TOKENS, seed), [f"token{place:02}" for place in range(MOST_TOKENS)]) for seed in range(8)
    ]
    assert len(render_report([run], None, (), [AttentionMaps("a text", maps)]).encode()) < 1_000_000


def run_report(*words: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.mark.slow
def test_the_command_draws_what_the_run_s_own_model_does(tiny_folder: Path, tmp_path: Path) -> None:
    run = sinkscope.scan(str(tiny_folder), seq_len=32, num_sequences=2, self_check=False)
    run.save(tmp_path / "run")
    text, out = "A short text of a few words.", tmp_path / "r.html"
    assert run_report(tmp_path / "run", "--maps", "1.0,0.1", "--text", text, "-o", out).exit_code == 0
    page = out.read_text()
    ((first, second),) = json.loads(re.findall(r'id="weights">(.*?)</script>', page)[0])
    layers = [site.layer for site in run.manifest.attention]
    expected = attention_maps(str(tiny_folder), text, layers, [(1, 0), (0, 1)])
    for shown, own in zip((first, second), expected, strict=True):
        for query, row in enumerate(shown["weights"]):
            assert np.array(row) * 1e-4 == pytest.approx(own.weights[query, : len(row)], abs=1e-4)
    assert run_report(tmp_path / "run", "--maps", "clearest", "-o", out).exit_code == 0
    heads = re.findall(r"<figcaption>layer (\d+), head (\d+) \(", out.read_text())
    assert [(int(layer), int(head)) for layer, head in heads] == [each[:2] for each in gallery_heads(run, 2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--maps", "strongest"), "name heads as LAYER.HEAD"),
        (("--maps", "1.2,3"), "name heads as LAYER.HEAD"),
        (("--maps", ",".join(f"0.{head}" for head in range(13))), "at most 12"),
        (("--text", "a"), "--text belongs to --maps"),
        (("--maps", "0.1,9.7"), "has no such head; its heads go from 0.0 to "),
    ],
)
def test_what_asks_for_no_map_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    result = run_report(tmp_path / "run", "-o", tmp_path / "r.html", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "r.html").exists()


def test_the_text_that_is_read_by_default_fits_a_tokenizer_of_bytes() -> None:
    assert len(TEXT.encode()) + 2 <= MOST_TOKENS


def test_maps_say_that_the_model_is_loaded_again(tmp_path: Path) -> None:
    """A run stores no maps: the help says so, and a model that is gone is named with the reason it is needed."""
    shown = " ".join(CliRunner().invoke(app, ["report", "--help"]).stdout.split())
    assert "A run stores no maps: its model is loaded again, and reads --text" in shown
    run = scanned()
    run.manifest.model = run.manifest.model.model_copy(update={"id": str(tmp_path / "gone")})
    run.save(tmp_path / "run")
    for words in (
        ("report", tmp_path / "run", "--maps", "clearest"),
        ("plot", tmp_path / "run", "--figure", "gallery"),
    ):
        refused = CliRunner().invoke(app, [*map(str, words), "-o", str(tmp_path / "out.svg")])
        assert refused.exit_code == 2
        assert "no run stores attention maps: the model must be loaded to draw them" in refused.stderr
        assert str(tmp_path / "gone") in refused.stderr.replace("\n", "")
        assert not (tmp_path / "out.svg").exists()


@pytest.mark.slow
def test_maps_of_other_weights_than_the_run_s_are_refused(copied: Path, tmp_path: Path) -> None:
    sinkscope.scan(str(copied), seq_len=32, num_sequences=2, self_check=False).save(tmp_path / "run")
    weights = load_file(copied / "model.safetensors")
    save_file({name: 1.1 * tensor for name, tensor in weights.items()}, copied / "model.safetensors", {"format": "pt"})
    drawn = "plot", "--figure", "attention", "--layer", "0", "--head", "1"
    for command, out in ((("report", "--maps", "1.0"), tmp_path / "r.html"), (drawn, tmp_path / "r.svg")):
        words = [command[0], tmp_path / "run", *command[1:], "--text", "A short text.", "-o", out]
        refused = CliRunner().invoke(app, [*map(str, words)])
        assert refused.exit_code == 2
        assert f"{copied} holds other weights than the run was made of" in refused.stderr
        assert not out.exists()

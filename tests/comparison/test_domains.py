"""Comparing domains and scores with each other; published numbers, massive activations, the controls of Gu et al."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Scan
from models import random_ids, tiny
from scipy.stats import false_discovery_control, ttest_ind, ttest_rel

import sinkscope
from sinkscope.inputs.documents import SYNTHETIC
from sinkscope.present.terminal.run import render_run
from sinkscope.runs.dormancy import SCORES, agreement, dormant_in_some, most_dormant, overlap
from sinkscope.runs.papers import published_for
from sinkscope.runs.request import make_request
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.schema.summary import HeadContrast
from sinkscope.runs.words import dormant_words
from sinkscope.tables.summary import _dormant

GROUPED = ("ftvvn", "avvn")


def bos_mass(run: Run, domain: str) -> np.ndarray:
    """[sequence, (layer, head)] from the per-sequence record."""
    table = run.sequences
    own = table[(table["domain"] == domain) & table["head"].notna()]
    return own.pivot_table("bos_mass", "sequence", ["layer", "head"]).to_numpy()


@pytest.fixture(scope="module")
def domains(tiny_folder: Path) -> Run:
    return sinkscope.scan(str(tiny_folder), data=["prose", "code"], seq_len=64, num_sequences=6)


@pytest.fixture(scope="module")
def both_bos(tiny_folder: Path) -> Run:
    return sinkscope.scan(str(tiny_folder), data="prose", bos=["always", "never"], seq_len=64, num_sequences=6)


@pytest.mark.slow
def test_unlike_texts_are_tested_as_separate_samples(domains: Run) -> None:
    table = domains.domains
    assert table is not None
    a, b = bos_mass(domains, "prose"), bos_mass(domains, "code")
    p = ttest_ind(b, a, equal_var=False).pvalue
    np.testing.assert_allclose(table["difference"], b.mean(0) - a.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(table["p"], p, rtol=1e-9)
    np.testing.assert_allclose(table["q"], false_discovery_control(p), rtol=1e-9)
    assert not table["paired"].any()


def test_a_document_that_two_datasets_read_counts_once_in_the_error(both_bos: Run) -> None:
    """Means over both datasets have as many independent values as there are documents: 6, not 12."""
    averages = [bos_mass(both_bos, domain).mean(1) for domain in both_bos.sequences["domain"].unique()]
    by_document = np.mean(averages, 0)
    found = both_bos.summary.streams["text"].bos_mass
    assert found.mean == pytest.approx(by_document.mean(), rel=1e-9)
    assert found.sem == pytest.approx(by_document.std(ddof=1) / 6**0.5, rel=1e-9)
    apart = next(iter(both_bos.summary.domains.values())).streams["text"].bos_mass
    assert apart.sem == pytest.approx(averages[0].std(ddof=1) / 6**0.5, rel=1e-9)


@pytest.mark.slow
def test_other_documents_count_by_themselves_in_the_error(domains: Run) -> None:
    values = np.concatenate([bos_mass(domains, domain).mean(1) for domain in ("prose", "code")])
    found = domains.summary.streams["text"].bos_mass
    assert found.sem == pytest.approx(values.std(ddof=1) / 12**0.5, rel=1e-9)


def test_one_text_with_and_without_bos_is_paired(both_bos: Run) -> None:
    table = both_bos.domains
    assert table is not None
    a, b = bos_mass(both_bos, "prose bos=always"), bos_mass(both_bos, "prose bos=never")
    np.testing.assert_allclose(table["p"], ttest_rel(b, a).pvalue, rtol=1e-9)
    assert table["paired"].all()
    firsts = {data.domain: data.first_token for data in both_bos.manifest.data}
    assert firsts["prose bos=always"].is_bos
    assert not firsts["prose bos=never"].is_bos


def jsonl(path: Path, subject: str, count: int = 5) -> str:
    """A file of `count` texts about a subject; returns its path."""
    path.parent.mkdir(exist_ok=True)
    texts = [f"The {subject} went out {n} times before the light had turned, and came home late. " * 12
             for n in range(count)]  # fmt: skip
    pd.DataFrame({"text": texts}).to_json(path, orient="records", lines=True)
    return str(path)


def paired(folder: Path, *specs: str, **options: Any) -> bool:
    """Whether a scan pairs its two domains; table and summary must say the same."""
    run = sinkscope.scan(str(folder), data=list(specs), seq_len=48, self_check=False, **options)
    assert run.domains is not None
    entry = run.summary.domains_compared[0]
    assert set(run.domains["paired"]) == {entry.paired}
    return entry.paired


@pytest.mark.slow
def test_files_of_one_name_are_not_paired(tiny_folder: Path, tmp_path: Path) -> None:
    """Unrelated texts in a/x.jsonl and b/x.jsonl: row 1 of one has nothing to do with row 1 of the other."""
    specs = [jsonl(tmp_path / name / "x.jsonl", subject) for name, subject in (("a", "boats"), ("b", "dogs"))]
    assert not paired(tiny_folder, *specs)


@pytest.mark.slow
def test_one_text_under_two_names_is_paired(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [jsonl(tmp_path / name, "boats") for name in ("a.jsonl", "b.jsonl")]
    assert paired(tiny_folder, *specs)
    monkeypatch.chdir(tmp_path)
    assert paired(tiny_folder, "a.jsonl#text", str(tmp_path / "b.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["random", "x.jsonl", "x.txt"])
def test_a_text_with_and_without_bos_is_paired(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    jsonl(tmp_path / "x.jsonl", "boats")
    (tmp_path / "x.txt").write_text("The boats went out before the light had turned. " * 60, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert paired(tiny_folder, spec, bos=["always", "never"], num_sequences=5)


@pytest.mark.slow
def test_windows_of_a_text_that_share_no_token_are_not_paired(tiny_folder: Path, tmp_path: Path) -> None:
    """Each window with BOS is a token shorter: of windows of 4 tokens, the fourth ones have no token in common."""
    path = tmp_path / "x.txt"
    path.write_text("The boats went out before the light had turned. " * 60, "utf-8")
    options = {"data": str(path), "bos": ["always", "never"], "seq_len": 4, "self_check": False}
    pairs = [sinkscope.scan(str(tiny_folder), num_sequences=n, **options).summary.domains_compared[0] for n in (3, 5)]
    assert [entry.paired for entry in pairs] == [True, False]


def test_q_decides_and_its_interval_agrees(domains: Run) -> None:
    table = domains.domains
    assert table is not None
    expected = table["q"] < 0.05
    assert (table["differs"] == expected).all()
    leaves_out = (table["low"] > 0) | (table["high"] < 0)
    assert (leaves_out == (table["p"] < 0.05)).all()
    assert leaves_out[expected].all()
    entry = domains.summary.domains_compared[0]
    assert entry.heads_that_differ == int(expected.sum()) == len(entry.heads)
    assert entry.heads_tested == len(table)
    sizes = [abs(head.difference) for head in entry.heads]
    assert all(first >= second for first, second in pairwise(sizes))


def test_a_domain_against_itself_differs_nowhere(tiny_folder: Path, tmp_path: Path) -> None:
    texts = [f"The {n} boats went out before the light had turned, and came home late. " * 12 for n in range(5)]
    for name in ("a", "b"):
        pd.DataFrame({"text": texts}).to_json(tmp_path / f"{name}.jsonl", orient="records", lines=True)
    specs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    run = sinkscope.scan(str(tiny_folder), data=specs, seq_len=48)
    assert run.domains is not None
    assert (run.domains["difference"] == 0).all()
    assert (run.domains["p"] == 1).all()
    assert not run.domains["differs"].any()


@pytest.mark.slow
def test_two_columns_of_one_file_are_paired(tiny_folder: Path, tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {name: [f"{name} {n} wrote a long plain letter home. " * 12 for n in range(5)] for name in "xy"}
    )
    frame.to_parquet(tmp_path / "parallel.parquet")
    run = sinkscope.scan(str(tiny_folder), data=[f"{tmp_path}/parallel.parquet#{c}" for c in "xy"], seq_len=48)
    assert run.domains is not None
    assert run.domains["paired"].all()


@pytest.mark.slow
def test_the_table_is_written_and_read_again(scan_cli: Scan, tiny_folder: Path) -> None:
    result = scan_cli(tiny_folder, "--data", "prose", "--data", "random")
    again = load_run(result.folder)
    assert again.domains is not None
    assert len(again.domains) == 2 * 4
    alone = scan_cli(tiny_folder, "--data", "prose", name="alone")
    assert not (alone.folder / "domains.csv").exists()
    assert load_run(alone.folder).domains is None


def test_a_first_token_that_all_datasets_have_is_named(domains: Run, both_bos: Run) -> None:
    for run, named in ((domains, True), (both_bos, False)):
        massive = run.summary.streams["text"].massive_activations
        places = [*run.summary.streams["text"].top_positions, *(p for c in massive.channels for p in c.positions)]
        first = {place.token for place in places if place.position == 0}
        assert first == {run.summary.first_token.text}
        assert (first != {None}) == named


@pytest.mark.slow
def test_sink_heads_are_counted_over_the_sequences_of_all_domains(domains: Run, tiny_folder: Path) -> None:
    """Half the heads lie above the median, however many each domain counts for itself."""
    rows = domains.sequences[domains.sequences["head"].notna()]
    scores = rows.groupby(["layer", "head"])["sink_score"].mean()
    options = {"data": ["prose", "code"], "seq_len": 64, "num_sequences": 6, "self_check": False}
    run = sinkscope.scan(str(tiny_folder), epsilon=float(scores.median()), **options)
    assert run.summary.streams["text"].sink_heads == len(scores) // 2 == 4


@pytest.mark.slow
def test_a_head_dormant_in_one_domain_is_named_with_it(domains: Run, tiny_folder: Path) -> None:
    """A rule that one head of one domain meets: the pooled answer must not say `none` and stop there."""
    lowest, second = domains.heads["honor"].nsmallest(2)
    row = domains.heads.loc[domains.heads["honor"].idxmin()]
    rule = f"honor<{(lowest + second) / 2}"
    options = {"data": ["prose", "code"], "seq_len": 64, "num_sequences": 6, "self_check": False}
    run = sinkscope.scan(str(tiny_folder), dormant_rule=rule, **options)
    stream = run.summary.streams["text"]
    assert (stream.dormant.count, stream.dormant.in_some_domains) == (0, 1)
    start = f"Dormant by {rule}: none of 8 heads in every dataset, 1 in some datasets only (honor: norm of a head's"
    assert any(sentence.startswith(start) for sentence in stream.in_words)
    lines = render_run(run).splitlines()
    other = "code" if row["domain"] == "prose" else "prose"
    assert f"{row['domain']}: {row['layer']}.{row['head']}" in lines
    assert f"{other}: none" in lines


def test_a_head_that_is_not_known_in_a_dataset_counts_once() -> None:
    """Verdicts in two datasets: head 3 is dormant where it is known, head 4 active; head 5 was read in one alone."""
    verdicts = {0: [True, True], 1: [True, False], 2: [False, False], 3: [True, None], 4: [None, False], 5: [True]}
    rows = [("text", 0, head, name, value) for head, own in verdicts.items() for name, value in zip("ab", own)]  # noqa: B905
    heads = pd.DataFrame(rows, columns=["stream", "layer", "head", "domain", "dormant"]).astype({"dormant": "boolean"})
    found = _dormant(heads, make_request(model="m"))
    assert (found.heads, found.count, found.in_some_domains, found.unknown) == ([(0, 0)], 1, 1, 3)
    assert dormant_words(found, 6) == "1 of 3 heads in every dataset, 1 in some datasets only, unknown in 3 more"
    [mixed] = dormant_in_some(heads)
    assert (mixed.head, mixed.dormant_in, mixed.active_in) == (1, ["a"], ["b"])


def of_many_domains(run: Run, count: int) -> Run:
    """The run as if it had read `count` domains, each pair of which differs, the last one most."""
    many, names = copy.deepcopy(run), [f"d{number}" for number in range(count)]
    first, contrast = run.summary.domains["prose"], run.summary.domains_compared[0]
    many.summary.domains = dict.fromkeys(names, first)
    pairs = list(combinations(names, 2))
    heads = [
        HeadContrast(stream="text", layer=1, head=2, difference=size / len(pairs), low=0, high=1, q=0.01)
        for size in range(1, len(pairs) + 1)
    ]
    many.summary.domains_compared = [
        contrast.model_copy(update={"a": a, "b": b, "heads": [head], "heads_that_differ": 1})
        for (a, b), head in zip(pairs, heads, strict=True)
    ]
    own = run.heads[run.heads["domain"] == "prose"]
    many.heads = pd.concat([own.assign(domain=name) for name in names], ignore_index=True)
    many.manifest.data = [run.manifest.data[0].model_copy(update={"domain": name}) for name in names]
    return many


def test_fifty_domains_fit_on_a_screen(domains: Run) -> None:
    """6,253 lines it would be with all pairs and maps: the strongest pairs come first, and the others are counted."""
    text = render_run(of_many_domains(domains, 50))
    lines = text.splitlines()
    assert len(lines) < 60
    assert "layers down" not in text
    assert "and 1219 more pairs (domains.csv)" in lines
    assert "and 38 more datasets (summary.json)" in lines
    pairs = [line.split()[:2] for line in lines if " Welch " in line]
    assert pairs[0] == ["d48", "d49"]
    assert len(pairs) == 6
    assert "chance alone gives up to 61 such pairs" in " ".join(text.split())


def test_a_few_domains_have_all_pairs_and_maps(domains: Run) -> None:
    text = render_run(of_many_domains(domains, 4))
    assert text.count("layers down") == 4
    assert text.count("Welch t-test") == 6


def test_most_dormant_takes_the_right_end_and_keeps_head_order_in_ties() -> None:
    heads = pd.DataFrame({
        "layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "honor": [0.9, 0.1, 0.1, np.nan], "awft": [0.2, 0.9, 0.1, 0.5],
    })  # fmt: skip
    assert most_dormant(heads, "honor", 3) == [(0, 1), (1, 0), (0, 0)]
    assert most_dormant(heads, "honor", 4) == [(0, 1), (1, 0), (0, 0)]
    assert most_dormant(heads, "awft", 2) == [(0, 1), (1, 1)]


def test_overlap_is_intersection_over_union() -> None:
    assert overlap([(0, 0), (0, 1)], [(0, 1), (1, 0)]) == pytest.approx(1 / 3)
    assert overlap([(0, 0)], [(0, 0)]) == 1
    assert np.isnan(overlap([], []))


def test_thirteen_scores_are_compared(domains: Run) -> None:
    found = domains.summary.streams["text"].dormancy_scores
    assert len(SCORES) == 13
    assert set(found.most_dormant) == set(SCORES)
    for a in SCORES:
        assert found.overlap[a][a] == 1
        for b in SCORES:
            assert found.overlap[a][b] == found.overlap[b][a]
    assert found.overlap["ahon"]["honor"] == agreement(domains.heads).overlap["ahon"]["honor"]


def test_a_score_that_all_heads_share_ranks_nothing() -> None:
    heads = pd.DataFrame(
        {"layer": [0] * 20, "head": range(20), "honor": range(20), "ftvvn_ln": [1.0] * 19 + [1 + 1e-9]}
    )
    found = agreement(heads)
    assert set(found.most_dormant) == {"honor"}
    assert found.most_dormant["honor"] == [(0, 0), (0, 1)]


def test_a_half_of_a_head_is_rounded_up() -> None:
    """As where arms take a share of the heads."""
    found = agreement(pd.DataFrame({"layer": [0] * 25, "head": range(25), "honor": range(25)}))
    assert found.count == 3
    assert found.most_dormant["honor"] == [(0, 0), (0, 1), (0, 2)]


def test_published_rows_are_found_by_hub_id() -> None:
    rows_ = published_for("meta-llama/meta-llama-3-8b")
    found = {row.text: row.value for row in rows_ if row.metric == "sink_rate"}
    assert found == {"natural (Pile)": 99.02, "random": 91.23, "repeated": 0.0}
    assert published_for("nobody/knows") == []
    assert published_for("") == []


def massive_model() -> Any:
    """A tiny Llama whose embedding of token 3 carries two massive channels."""
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 7] = 5000.0
        model.get_input_embeddings().weight[3, 21] = -4000.0
    return model


def test_massive_channels_are_named_with_their_positions() -> None:
    ids = random_ids(3, 40).clone()
    ids[ids == 3] = 4
    ids[:, 0] = 3
    ids[1, 9] = 3
    run = sinkscope.scan(massive_model(), data=ids, self_check=False)
    massive = run.summary.streams["text"].massive_activations
    found = {entry.channel: entry for entry in massive.channels}
    assert {7, 21} <= set(found)
    assert found[21].layers[0] == 0
    assert found[21].tokens_per_sequence == pytest.approx(4 / 3)
    places = {place.position: place for place in found[7].positions}
    assert places[0].percent == 100
    assert places[9].percent == pytest.approx(100 / 3)
    first = run.layers.iloc[0]
    assert first["max_abs"] == 5000
    assert first["massive_tokens"] == pytest.approx(4 / 3)
    assert massive.over_layer_median > 1000
    assert massive.over_token_median > 1000


@pytest.mark.slow
def test_repeated_tokens_without_positions_attend_uniformly() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        model.wpe.weight.zero_()
    length = 64
    ids = torch.full((2, length), 5)
    run = sinkscope.scan(model, data=ids)
    exact = sum(1 / n for n in range(1, length + 1)) / length
    np.testing.assert_allclose(run.heads["sink_score"], exact, rtol=1e-6)
    expected = [sum(1 / (t + 1) for t in range(k, length)) / (length - k) for k in range(length)]
    for _, rows_ in run.positions.groupby(["layer", "head"]):
        np.testing.assert_allclose(rows_["alpha"], expected, rtol=1e-5)
        np.testing.assert_allclose(rows_["bos_mass"], 1 / np.arange(1, length + 1), rtol=1e-5)
    assert (run.heads["sink_rate"] == 0).all()


def test_repeated_tokens_under_rope_have_no_sink() -> None:
    run = sinkscope.scan(tiny("llama"), data=torch.full((4, 64), 11), epsilon=0.3)
    assert (run.heads["sink_rate"] == 0).all()
    assert run.summary.streams["text"].sink_rate_percent["0.3"].as_dict() == {"T": 0.0, "t64": 0.0}


@pytest.mark.slow
def test_natural_random_repeated_give_one_row_each(scan_cli: Scan, tiny_folder: Path) -> None:
    result = scan_cli(tiny_folder, "--data", "prose", *[word for spec in SYNTHETIC for word in ("--data", spec)])
    assert result.code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("repeated "))
    assert len(row.split()) == 7
    assert list(load_run(result.folder).summary.domains) == ["prose", *SYNTHETIC]


@pytest.mark.parametrize("modes", [["always", "always"], [], ["sometimes"]])
def test_wrong_bos_modes_are_refused(tiny_folder: Path, modes: list[str]) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="--bos"):
        sinkscope.scan(str(tiny_folder), bos=modes, seq_len=32, num_sequences=2)

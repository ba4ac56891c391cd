"""A run for a model card: what the hub's own reader makes of it, escaping, the badge."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from desk import hostile, scanned
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.training.callback import logged_values
from sinkscope.experiments.training.trajectory import trajectory_rows
from sinkscope.present.card import markdown_block, model_index, render_badge, render_card
from sinkscope.present.terminal.run import render_models
from sinkscope.runs.atlas import atlas, atlas_table
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.schema.manifest import AdapterFacts

EVIL = "a\n---\nb: |\x1b <script>alert(1)</script> [x](http://e) `"


def test_the_hub_reads_the_numbers_of_the_run() -> None:
    run = scanned()
    card = ModelCard(render_card(run))
    stream = run.summary.streams["text"]
    found = {each.metric_type: each for each in card.data.eval_results}
    assert found["bos_mass"].metric_value == pytest.approx(stream.bos_mass.mean, rel=1e-5)
    assert found["sink_rate"].metric_value == pytest.approx(stream.sink_rate_percent["0.3"].T, rel=1e-5)
    assert found["dormant"].metric_value == stream.dormant.count
    assert "sink_rate_64" not in found, "a number that is missing is left out"
    assert found["bos_mass"].metric_args == {"seq_len": 48, "num_sequences": 8}
    assert (found["bos_mass"].task_type, found["bos_mass"].dataset_type) == ("text-generation", "token ids")
    assert card.data.model_name == "tiny"
    assert card.text.startswith("\n## Attention sinks\n")


def test_a_number_of_dormant_heads_that_is_not_known_is_missing() -> None:
    """0 would say that every head is active."""
    run = scanned()
    dormant = run.summary.streams["text"].dormant
    dormant.count, dormant.heads, dormant.unknown = 2, [(0, 0), (0, 1)], 4
    assert "| 2 of 8 (honor&lt;0.4) |" in markdown_block(run), "of the heads that have the column"
    dormant.count, dormant.heads, dormant.unknown = 0, [], 12
    assert "| unknown (honor&lt;0.4) |" in markdown_block(run)
    assert "dormant" not in {each.metric_type for each in ModelCard(render_card(run)).data.eval_results}
    assert render_models([run]).splitlines()[-1].split()[-1] == "-"
    assert atlas_table(atlas([run]))["dormant"].isna().all()
    assert "sink/dormant" not in logged_values(run)
    rows = trajectory_rows(run, 0)
    assert rows.loc[rows["metric"] == "dormant", "value"].isna().all()


def test_the_block_holds_the_answer_and_a_row_for_each_text() -> None:
    run = load_run(Path(__file__).parents[1] / "fixtures" / "v0_1" / "two-bos")
    text = markdown_block(run)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert [row.split(" | ")[0] for row in rows] == ["| text", *(f"| {name}" for name in run.summary.data)]
    assert len({row.count(" | ") for row in rows}) == 1
    for name, entry in run.summary.domains.items():
        assert f"**{name}**: " in text
        assert entry.streams["text"].in_words[0].split("alpha_0")[0] in text


def test_the_threshold_of_the_rates_is_named() -> None:
    """The answer above the table is at the run's own epsilon, which may be another."""
    assert "| sink rate (alpha\\_0 &gt; 0.3), % | first 64 (alpha\\_0 &gt; 0.3), % |" in markdown_block(scanned())


def test_names_and_warnings_stay_text() -> None:
    run = hostile(scanned(), EVIL)
    card = ModelCard(render_card(run))
    assert card.data.model_name == EVIL.replace("\n", "\\n").replace("\x1b", "\\x1b")
    assert set(card.data.to_dict()) == {"model-index"}
    block = markdown_block(run)
    assert "<script>" not in block
    assert block.count("](http") == block.count("\\](http"), "a bracket is escaped"
    assert "\x1b" not in block


def test_published_numbers_that_were_measured_alike_are_listed() -> None:
    run = scanned()
    run.manifest.model.id, run.manifest.data[0].bos = "meta-llama/Llama-2-7b-hf", "auto"
    assert "Published" not in markdown_block(run), "T differs"
    run.summary.streams["text"].tokens_per_sequence = 64
    assert "92.47 % on natural (Pile), eps 0.3, T = 64, 100 sequences (Gu et al. 2410.10781 table 1)" in markdown_block(
        run
    )


def test_unequal_lengths_are_told() -> None:
    """Published numbers of 64 tokens fit no run in which one sequence has fewer."""
    run = scanned()
    run.manifest.model.id, run.manifest.data[0].bos = "meta-llama/Llama-2-7b-hf", "auto"
    run.manifest.data[0].seq_len = run.summary.streams["text"].tokens_per_sequence = 64
    run.manifest.data[0].shortest = 48
    block = markdown_block(run)
    assert "| 48 to 64 | 8 |" in block
    assert "Published" not in block
    assert '{"seq_len": 64, "num_sequences": 8, "shortest": 48}' in model_index(run)
    run.manifest.data[0].shortest = None
    assert "Published" in markdown_block(run)


@pytest.mark.parametrize(
    ("name", "shown"), [("/home/me/my-model", "my-model"), ("../my-model", "my-model"), ("org/name", "org/name")]
)
def test_folders_of_ones_own_are_not_told(name: str, shown: str) -> None:
    run = scanned()
    run.manifest.model.id = name
    assert model_index(run).splitlines()[1] == f'- name: "{shown}"'
    assert "/home/me" not in render_card(run)


def test_a_folder_is_called_by_its_last_name() -> None:
    """The weights of `out/checkpoint-100` and `a/b/c` are files without a commit; a hub id has the same form."""
    run = scanned()
    model = run.manifest.model
    model.id, model.weights_sha256 = "out/checkpoint-100", "0" * 64
    assert model_index(run).splitlines()[1] == '- name: "checkpoint-100"'
    model.adapter = AdapterFacts(path="out/lora", kind="LORA", base=None, files={}, base_weights_sha256=None)
    assert model_index(run).splitlines()[1] == '- name: "checkpoint-100 with lora"'
    model.id, model.revision = "org/model", "1" * 40
    assert model_index(run).splitlines()[1] == '- name: "org/model with lora"'
    model.id, model.name, model.adapter = "out/checkpoint-100", "org/tuned", None
    assert model_index(run).splitlines()[1] == '- name: "org/tuned"'


def test_an_interrupted_run_is_refused() -> None:
    run = scanned()
    run.manifest.complete = False
    for render in (markdown_block, model_index, render_badge):
        with pytest.raises(SinkscopeError, match="was interrupted: scan it to the end"):
            render(run)


def test_the_badge_says_the_sink_rate() -> None:
    run = scanned()
    rate = f"{run.summary.streams['text'].sink_rate_percent['0.3'].T:.1f}"
    root = ElementTree.fromstring(render_badge(run))
    assert root.attrib["aria-label"] == f"attention sinks: sink rate {rate} % (alpha_0 > 0.3) at T = 48"
    assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")][0:1] == ["attention sinks"]
    run.summary.streams["text"].uniform_alpha_0.T = 0.9
    assert ">sink rate unknown<" in render_badge(run)


def saved(folder: Path) -> Run:
    run = scanned()
    run.save(folder)
    return run


def test_the_command(tmp_path: Path) -> None:
    run = saved(tmp_path / "run")
    out, badge = tmp_path / "card.md", tmp_path / "sinks.svg"
    result = CliRunner().invoke(app, ["card", str(tmp_path / "run"), "-o", str(out), "--badge", str(badge)])
    assert result.exit_code == 0, result.output
    assert out.read_text("utf-8") == render_card(run)
    assert badge.read_text("utf-8") == render_badge(run)
    for part, text in (("yaml", model_index(run)), ("markdown", markdown_block(run))):
        assert CliRunner().invoke(app, ["card", str(tmp_path / "run"), "--part", part]).stdout == text


@pytest.mark.parametrize("words", [["--part", "ymal"], ["-o", "no/card.md"], ["--badge", "no/sinks.svg"]])
def test_bad_input_is_one_line_and_writes_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run")
    result = CliRunner().invoke(app, ["card", "run", *words])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_each_answer_after_the_first_is_an_item_of_a_list() -> None:
    run = scanned()
    run.summary.streams["text"].in_words[:] = ["No sink.", "Dormant: <1>.", "Spikes: none."]
    assert "\n\nNo sink.\n\n- Dormant: &lt;1&gt;.\n- Spikes: none.\n\n|" in markdown_block(run)

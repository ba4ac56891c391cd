"""Models with learned keys and values beside those of their tokens: a watch and a scan give the columns of naive
float64 attention, in which such a key is a learned sink, or say in a line what they do not read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import causal as causal_model
from maps import columns
from modeling_torch import torch_model
from models import random_ids
from own_code import READ, Attention, Writer, hidden, ids_of, scanned, watched, writer
from plain_models import HEADS, WIDTH, Reader
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import sinkscope
from sinkscope import SinkscopeError

LENGTH, NARROW = 24, WIDTH // HEADS
REFUSED = r"attends to learned keys \(memory, null or bias keys\) that are not read: "


def of_head(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, tokens: slice, writes: Tensor
) -> dict[str, Tensor]:
    """The columns of some heads by their definitions, [B, H]. query (B, H, T, d), key and value (B, H, n + T, d) with
    learned ones, seen (T, n + T), writes (H, D, d)."""
    logits = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    every = logits.softmax(-1)
    maps, own = every[..., tokens], value[:, :, tokens]
    first = maps[..., 0]
    mixed, whole, norms = maps @ own, every @ value, own.norm(dim=-1)
    written = (whole @ writes.mT).norm(dim=-1)
    values = (own @ writes.mT).norm(dim=-1)
    entropy, counts = torch.special.entr(maps).sum(-1), seen[:, tokens].sum(-1)
    several = counts > 1
    several[0] = False
    size = whole.norm(dim=-1)
    plain = query @ key[:, :, tokens].mT * query.shape[-1] ** -0.5
    allowed = seen[:, tokens]
    gap = plain[..., 0] - (plain * allowed).sum(-1) / counts
    return {
        "bos_mass": first[..., 1:].mean(-1),
        "sink_score": first.mean(-1),
        "self_mass": maps.diagonal(0, -2, -1)[..., 1:].mean(-1),
        "previous_mass": maps.diagonal(-1, -2, -1).mean(-1),
        "entropy": entropy.mean(-1),
        "uniformity": (entropy / counts.double().log())[..., several].mean(-1),
        "learned_sink_mass": 1 - maps.sum((-2, -1)) / maps.shape[-2],
        "sink_margin": (first / (1 - first)).log()[..., 1:].mean(-1),
        "first_argmax": (maps.argmax(-1) == 0).double()[..., 1:].mean(-1),
        "first4_mass": maps[..., :4].sum(-1).mean(-1),
        "logit_gap": gap[..., 1:].mean(-1),
        "k_norm_other": key[:, :, tokens][:, :, 1:].norm(dim=-1).mean(-1),
        "ftvvn": norms[..., 0],
        "avvn": norms.mean(-1),
        "value_drain": norms[..., 0] / norms[..., 1:].mean(-1),
        "ov_drain": values[..., 0] / values[..., 1:].mean(-1),
        "ahon": size.mean(-1),
        "lthon": size[..., -1],
        "honor": size.mean(-1) / size.mean((1, 2))[:, None],
        "residual_write": written.mean(-1),
        "gate_open": mixed.norm(dim=-1).mean(-1) / norms[..., 1:].mean(-1),
    }


def assert_columns(run: Any, expected: list[dict[str, Tensor]], atol: float = 1e-12) -> None:
    """Each layer's heads have these columns."""
    assert {site.kind.name for site in run.manifest.attention} == {"full"}
    assert len(run.layers) == len(expected)
    for layer, found in enumerate(expected):
        heads = run.heads[run.heads["layer"] == layer]
        for name, values in found.items():
            np.testing.assert_allclose(
                heads[name], values.mean(0), rtol=max(1e-7, atol), atol=atol, err_msg=f"{layer} {name}"
            )


class ByTorch(nn.Module):
    """torch's own module, with a learned key, one of zeros, or both."""

    def __init__(self, causal: bool = True, weights: bool = False, **more: bool) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **more)
        self.causal, self.weights = causal, weights

    def forward(self, x: Tensor) -> Tensor:
        later = hidden(x.shape[1]) if self.causal else None
        mixed: Tensor = self.attend(x, x, x, attn_mask=later, need_weights=self.weights)[0]
        return mixed


def by_torch_expected(model: nn.Module, ids: Tensor, causal: bool) -> list[dict[str, Tensor]]:
    """The columns of every layer of a model of ByTorch, whose maps are those that its modules return."""
    found, given = [], list[Tensor]()
    attends = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    hooks = [each.register_forward_hook(lambda module, args, _: given.append(args[0])) for each in attends]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    for module, x in zip(attends, given, strict=True):
        found.append(_of_module(module, x.detach(), causal))
    return found


@torch.no_grad()
def _of_module(module: nn.MultiheadAttention, x: Tensor, causal: bool) -> dict[str, Tensor]:
    packed = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    query, key, value = packed.chunk(3, -1)
    if module.bias_k is not None and module.bias_v is not None:
        key, value = (torch.cat([each, one.expand(len(x), 1, -1)], 1)
                      for each, one in ((key, module.bias_k), (value, module.bias_v)))  # fmt: skip
    if module.add_zero_attn:
        key, value = (nn.functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
    heads = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key, value)]
    length = x.shape[1]
    seen = torch.ones(length, key.shape[1], dtype=torch.bool)
    seen[:, :length] = ~hidden(length) if causal else True
    writes = module.out_proj.weight.unflatten(1, (HEADS, -1)).transpose(0, 1)
    theirs = module(
        x, x, x, attn_mask=hidden(length) if causal else None, need_weights=True, average_attn_weights=False
    )[1]
    ours = (heads[0] @ heads[1].mT * NARROW**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(ours, theirs)
    return of_head(*heads, seen, slice(0, length), writes)


MORE = [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]
WAYS = [(more, causal, weights) for more in MORE for causal in (True, False) for weights in (True, False)]


@pytest.mark.parametrize(("more", "causal", "weights"), slow_but(WAYS, WAYS[0], WAYS[3], WAYS[6], WAYS[9]))
@pytest.mark.parametrize("read", READ)
def test_learned_keys_of_torch_s_module_are_learned_sinks(
    read: Any, more: dict[str, bool], causal: bool, weights: bool
) -> None:
    model, ids = Writer(lambda: ByTorch(causal, weights, **more)).double(), ids_of(2, LENGTH)
    run = read(model, ids)
    assert_columns(run, by_torch_expected(model, ids, causal))
    assert (run.heads["learned_sink_mass"] > 0.001).all()


class OfAllButOne(ByTorch):
    """Attends to a learned key and to all positions but the last: to as many keys as there are queries."""

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attend(x, x[:, :-1], x[:, :-1], need_weights=False)[0]
        return mixed


@pytest.mark.parametrize("read", READ)
def test_a_learned_key_beside_another_text_of_one_key_less_is_told_from_its_keys(read: Any) -> None:
    with_key, ids = Writer(lambda: OfAllButOne(add_bias_kv=True)), ids_of(2, LENGTH)
    run = read(with_key, ids)
    assert {site.kind.name for site in run.manifest.attention} == {"cross"}
    for block in with_key.blocks:
        block.attn.attend.bias_k, block.attn.attend.bias_v = None, None
    plain = read(with_key, ids).heads
    assert (plain["learned_sink_mass"] == 0).all()
    assert (run.heads["learned_sink_mass"] > 0.001).all()
    for name in ("ftvvn", "k_norm_first", "k_norm_other", "value_drain"):
        np.testing.assert_allclose(run.heads[name][:HEADS], plain[name][:HEADS], rtol=1e-5, err_msg=name)


def test_a_hidden_learned_key_takes_nothing() -> None:
    """torch's function puts it behind all tokens, and `is_causal` hides what comes after the query."""

    class Hidden(ByTorch):
        def forward(self, x: Tensor) -> Tensor:
            later = hidden(x.shape[1])
            return self.attend(x, x, x, attn_mask=later, is_causal=True, need_weights=False)[0]  # type: ignore[no-any-return]

    run = watched(Writer(lambda: Hidden(add_bias_kv=True)), ids_of(2, LENGTH))
    assert (run.heads["learned_sink_mass"] == 0).all()
    plain = watched(Writer(lambda: ByTorch(add_bias_kv=True)), ids_of(2, LENGTH))
    assert (plain.heads["learned_sink_mass"] > 0.001).all()


@pytest.mark.parametrize("causal", [True, False])
def test_padding_and_learned_keys_are_told_apart(causal: bool) -> None:
    ids, lengths = random_ids(2, LENGTH), (LENGTH, 15)
    mask = torch.ones_like(ids)
    ids[1, 15:], mask[1, 15:] = 0, 0
    model = torch_model(kind="no_weights", causal=causal, bias_kv=True, zero_attn=True)
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        maps = model.reference(**given)
        with sinkscope.watch(model) as seen:
            model(**given)
    for run in (sinkscope.scan(model, data=given, batch_size=2), seen.run()):
        rows = run.sequences[run.sequences["head"].notna()]
        for site, both in zip(run.manifest.attention, maps, strict=True):
            for number, length in enumerate(lengths):
                own = rows[(rows["module"] == site.module) & (rows["sequence"] == number)].sort_values("head")
                for name, expected in columns(both[number, :, :length, :length].double()).items():
                    np.testing.assert_allclose(own[name], expected, atol=1e-5, err_msg=f"{number} {name}")


BESIDE = 4
"""Learned keys of a layer."""


class Beside(Attention):
    """Has learned keys and values, [2, G, n, d], which `attend` puts beside those of the tokens. `empty`: the values
    are 0."""

    def __init__(self, attend: Any, groups: int = HEADS, empty: bool = False) -> None:
        super().__init__(attend)
        self.beside = nn.Parameter(torch.zeros(2, groups, BESIDE, NARROW))
        self.empty = empty

    def learned(self, rows: int) -> tuple[Tensor, Tensor]:
        """The learned keys and values, for each sequence and head."""
        key, value = self.beside.repeat_interleave(HEADS // self.beside.shape[1], 1).expand(2, -1, -1, -1)
        value = torch.zeros_like(value) if self.empty else value
        return key.expand(rows, -1, -1, -1), value.expand(rows, -1, -1, -1)


def seen_of(length: int, behind: int, causal: bool) -> Tensor:
    """(T, BESIDE + T): which keys a query sees: all learned ones, of which so many stand behind the tokens', and those
    of tokens up to its own."""
    order = ~hidden(length) if causal else torch.ones(length, length, dtype=torch.bool)
    learned = torch.ones(length, BESIDE, dtype=torch.bool)
    return torch.cat([learned[:, behind:], order, learned[:, :behind]], 1)


def joined(module: Any, key: Tensor, value: Tensor, behind: int) -> list[Tensor]:
    pairs = zip((key, value), module.learned(len(key)), strict=True)
    return [torch.cat([learned[:, :, behind:], own, learned[:, :, :behind]], 2) for own, learned in pairs]


def by_function(behind: int, causal: bool) -> Any:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = joined(module, key, value, behind)
        return scaled_dot_product_attention(query, key, value, seen_of(query.shape[2], behind, causal))

    return attend


def by_hand(behind: int, causal: bool) -> Any:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = joined(module, key, value, behind)
        logits = query @ key.mT * query.shape[-1] ** -0.5
        return logits.masked_fill(~seen_of(query.shape[2], behind, causal), -torch.inf).softmax(-1) @ value

    return attend


def beside_expected(
    model: nn.Module, ids: Tensor, behind: int, seen: Callable[[int], Tensor]
) -> list[dict[str, Tensor]]:
    """The columns of every layer of a model of Beside."""
    found, given = [], list[Tensor]()
    modules = [module for module in model.modules() if isinstance(module, Beside)]
    hooks = [module.register_forward_hook(lambda module, args, _: given.append(args[0])) for module in modules]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    for module, x in zip(modules, given, strict=True):
        query, key, value = (
            each.unflatten(2, (HEADS, -1)).transpose(1, 2).detach() for each in module.qkv(x).split(WIDTH, 2)
        )
        key, value = (each.detach() for each in joined(module, key, value, behind))
        length = x.shape[1]
        tokens = slice(BESIDE - behind, BESIDE - behind + length)
        writes = module.proj.weight.detach().unflatten(1, (HEADS, -1)).transpose(0, 1)
        found.append(of_head(query, key, value, seen(length), tokens, writes))
    return found


def by_interface(behind: int, causal: bool) -> Any:
    """Through transformers' interface, where a scan computes the output."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = joined(module, key, value, behind)
        seen = seen_of(query.shape[2], behind, causal)[None, None]
        mixed: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, seen, scaling=NARROW**-0.5)[0]
        return mixed.transpose(1, 2)

    return attend


OWN = [(way, behind, causal, empty) for way in (by_function, by_hand, by_interface) for behind in (0, BESIDE)
       for causal in (True, False) for empty in (False, True)]  # fmt: skip
OWN += [(way, BESIDE // 2, causal, False) for way in (by_function, by_hand, by_interface) for causal in (True, False)]


@pytest.mark.parametrize(
    ("way", "behind", "causal", "empty"),
    slow_but(OWN, OWN[0], OWN[5], OWN[11], OWN[14], OWN[16], OWN[23], OWN[24], OWN[27], OWN[29]),
)
@pytest.mark.parametrize("read", READ)
def test_learned_keys_of_somebody_s_own_code_are_learned_sinks(
    read: Any, way: Any, behind: int, causal: bool, empty: bool
) -> None:
    model, ids = Writer(lambda: Beside(way(behind, causal), empty=empty)).double(), ids_of(2, LENGTH)
    run = read(model, ids)
    assert_columns(run, beside_expected(model, ids, behind, lambda length: seen_of(length, behind, causal)))
    assert (run.heads["learned_sink_mass"] > 0.001).all()


def by_flex(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = joined(module, key, value, 0)
    mask = create_block_mask(lambda b, h, i, j: j <= i + BESIDE, None, None, query.shape[2], key.shape[2], device="cpu")
    return flex_attention(query, key, value, block_mask=mask)  # type: ignore[return-value]


def by_added_mask(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Hides later tokens by the dtype's most negative number."""
    key, value = joined(module, key, value, 0)
    later = ~seen_of(query.shape[2], 0, True)
    return scaled_dot_product_attention(query, key, value, later * torch.finfo(query.dtype).min)


def in_one_axis(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts sequences and heads into one axis."""
    query, key, value = (each.flatten(0, 1) for each in (query, *joined(module, key, value, 0)))
    logits = torch.bmm(query, key.mT) * NARROW**-0.5
    maps = logits.masked_fill(~seen_of(query.shape[1], 0, True), -torch.inf).softmax(-1)
    return torch.bmm(maps, value).unflatten(0, (-1, HEADS))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("read", "attend"),
    slow_but(
        list(product(READ, [by_flex, by_added_mask, in_one_axis])),
        (scanned, by_flex),
        (watched, by_added_mask),
        (watched, in_one_axis),
        (scanned, in_one_axis),
    ),
)
def test_learned_keys_are_read_in_every_way_to_attend(read: Any, attend: Any) -> None:
    model, ids = Writer(lambda: Beside(attend)), ids_of(2, LENGTH)
    run = read(model, ids)
    assert_columns(run, beside_expected(model, ids, 0, lambda length: seen_of(length, 0, True)), 2e-6)


def top_left(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Leaves the causal order to torch's function, which counts the learned keys as the first of its order."""
    key, value = joined(module, key, value, 0)
    return scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("read", READ)
def test_an_order_that_counts_learned_keys_is_theirs(read: Any) -> None:
    """The first three queries see no token, and the others not themselves."""
    model, ids = Writer(lambda: Beside(top_left)).double(), ids_of(2, LENGTH)
    expected = beside_expected(model, ids, 0, lambda n: torch.ones(n, n + BESIDE, dtype=torch.bool).tril())
    names = ("bos_mass", "self_mass", "previous_mass", "entropy", "learned_sink_mass", "ahon", "gate_open")
    run = read(model, ids)
    assert_columns(run, [{name: columns[name] for name in names} for columns in expected])


def shared(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Multi-query attention with a null key, as diffusion models write it: keys have no axis of heads."""
    key, value = (each[:, 0] for each in joined(module, key, value, 0))
    maps = (torch.einsum("bhid,bjd->bhij", query, key) * query.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", maps, value)


@pytest.mark.parametrize("read", READ)
def test_learned_keys_that_heads_share_are_read(read: Any) -> None:
    run = read(Writer(lambda: Beside(shared, 1)), ids_of(2, LENGTH))
    assert (run.heads["learned_sink_mass"] > 0.001).all()
    assert (run.heads["first_visible"] == 1).all()
    assert run.heads[["gate_open", "value_drain", "honor"]].notna().all(axis=None)


@pytest.mark.parametrize("way", [by_function, by_hand])
def test_a_question_asks_for_what_comes_from_tokens(way: Any) -> None:
    """A column that needs W sum_j A[i,j] z_j, or the share of the output that comes from some tokens, is empty, since
    the head adds a learned value to it."""
    ids = ids_of(2, LENGTH)
    for empty in (False, True):
        model = Writer(lambda empty=empty: Beside(way(False, True), empty=empty))
        run = sinkscope.scan(model, data=ids, measure=("smoothing", "streaming"), window=4, sinks=1)
        assert run.smoothing[["avgcos_identity", "avgcos_uniform", "rank_w"]].notna().all(axis=None)
        assert (run.smoothing["avgcos_attention"].isna() == (not empty)).all()
        assert (run.measured["streaming"]["distant_write"].isna() == (not empty)).all()
        sums = run.measured["streaming"]["streaming_mass"] + run.measured["streaming"]["distant_mass"]
        assert (sums < 0.99).all()


def test_training_and_autocast_are_read_before_dropout_and_in_full_precision() -> None:
    class Dropping(ByTorch):
        def __init__(self) -> None:
            super().__init__(add_bias_kv=True)
            self.attend = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True, add_bias_kv=True)

    model, ids = Writer(Dropping), ids_of(2, LENGTH)
    with torch.no_grad(), sinkscope.watch(model) as alone:
        model(ids)
    expected = alone.run().heads[:HEADS]
    model.train()
    with sinkscope.watch(model) as trained:
        model(ids).sum().backward()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), sinkscope.watch(model) as cast:
        model(ids)
    for run, tolerance in ((trained.run(), 1e-6), (cast.run(), 1e-2)):
        for name in ("bos_mass", "learned_sink_mass", "entropy"):
            np.testing.assert_allclose(run.heads[name][:HEADS], expected[name], rtol=tolerance, atol=tolerance)


class Remembering(LlamaAttention):
    """Llama's attention with three learned keys and values in front of those of the tokens."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.beside = nn.Parameter(torch.randn(2, config.num_key_value_heads, BESIDE, self.head_dim))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = (each(hidden_states).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
                             for each in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        key, value = (torch.cat([own.expand(len(key), -1, -1, -1), each], 2)
                      for own, each in zip(self.beside, (key, value), strict=True))  # fmt: skip
        seen = seen_of(query.shape[2], 0, True)[None, None]
        mixed = ALL_ATTENTION_FUNCTIONS["sdpa"](self, query, key, value, seen, scaling=self.scaling)[0]
        return self.o_proj(mixed.flatten(2)), None


def test_an_arm_refuses_learned_keys() -> None:
    """It changes keys by their places, which are not those of tokens."""
    model = causal_model("llama")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn = Remembering(model.config, number).double().eval()
    ids = random_ids(2, LENGTH)
    run = sinkscope.scan(model, data=ids)
    assert (run.heads["learned_sink_mass"] > 0.001).all()
    assert run.heads["gate_open"].notna().all()
    with pytest.raises(SinkscopeError, match=f"self_attn {REFUSED}an arm would take them for keys of tokens"):
        sinkscope.arms(model, ["keys:first1"], data=ids)


def made_of_some(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts three keys and values in front that are no parameters, but what a model makes of some."""
    learned = torch.arange(8.0 * BESIDE).view(BESIDE, 8).sin().expand(len(key), HEADS, BESIDE, 8).to(key)
    key, value = torch.cat([learned, key], 2), torch.cat([learned, value], 2)
    maps = (query @ key.mT).masked_fill(~seen_of(query.shape[2], 0, True), -torch.inf).softmax(-1)
    module.note(maps)
    return maps @ value


def test_a_scan_reads_learned_keys_that_are_no_parameters() -> None:
    """The dry runs over two texts show which keys no token changes."""
    model, ids = writer(made_of_some).double(), ids_of(2, LENGTH)
    run = scanned(model, ids)
    for block in model.blocks:
        block.attn.noted.clear()
    with torch.no_grad():
        model(ids)
    for layer, block in enumerate(model.blocks):
        heads, maps = run.heads[run.heads["layer"] == layer], block.attn.noted[0]
        np.testing.assert_allclose(heads["learned_sink_mass"], maps[..., :BESIDE].sum(-1).mean((0, 2)), atol=1e-12)
        np.testing.assert_allclose(heads["bos_mass"], maps[:, :, 1:, BESIDE].mean((0, 2)), atol=1e-12)
        own = maps[..., BESIDE:].diagonal(0, -2, -1)[..., 1:].mean((0, 2))
        np.testing.assert_allclose(heads["self_mass"], own, atol=1e-12)


def made_both_ways(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by torch's function, without a causal order."""
    learned = torch.arange(8.0 * BESIDE).view(BESIDE, 8).sin().expand(len(key), HEADS, BESIDE, 8).to(key)
    return scaled_dot_product_attention(query, torch.cat([learned, key], 2), torch.cat([learned, value], 2))


def by_hand_both_ways(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    learned = torch.arange(8.0 * BESIDE).view(BESIDE, 8).sin().expand(len(key), HEADS, BESIDE, 8).to(key)
    return (query @ torch.cat([learned, key], 2).mT).softmax(-1) @ torch.cat([learned, value], 2)


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")
@pytest.mark.parametrize("attend", [made_of_some, made_both_ways, by_hand_both_ways])
def test_a_watch_tells_learned_keys_that_are_no_parameters(attend: Any) -> None:
    """In one pass they could be a beginning that all sequences share; behind it, a causal text would go on."""
    why = "model's own cache" if attend is made_of_some else f"^nothing was measured: blocks.0.attn {REFUSED}all seq"
    with pytest.raises(SinkscopeError, match=why):
        watched(writer(attend), ids_of(2, LENGTH))


def between(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts a learned key between those of the first token and the second."""
    learned = torch.ones(len(key), HEADS, 1, NARROW).to(key)
    key, value = (torch.cat([each[:, :, :1], learned, each[:, :, 1:]], 2) for each in (key, value))
    return (query @ key.mT).softmax(-1) @ value


def learned_key_alone(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts a learned key in front whose value is the mean of the tokens'."""
    key = torch.cat([torch.ones(len(key), HEADS, 1, NARROW).to(key), key], 2)
    return (query @ key.mT).softmax(-1) @ torch.cat([value.mean(2, keepdim=True), value], 2)


def of_each_sequence(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts a key in front that is another one in each sequence of a batch."""
    learned = torch.arange(1.0, len(key) + 1).view(-1, 1, 1, 1).expand(-1, HEADS, 1, NARROW)
    return (query @ torch.cat([learned, key], 2).mT).softmax(-1) @ torch.cat([learned, value], 2)


def one_for_eight(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts a learned key in front for every eight tokens of a sequence."""
    learned = torch.ones(len(key), HEADS, -(-query.shape[2] // 8), NARROW)
    return (query @ torch.cat([learned, key], 2).mT).softmax(-1) @ torch.cat([learned, value], 2)


def in_the_second_call(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends twice, the second time with learned keys."""
    first = (query @ key.mT).softmax(-1) @ value
    return by_hand(0, False)(module, first, key, value)


@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (between, "some stand between the keys of tokens"),
        (learned_key_alone, "their values were not seen, or are not learned"),
        (of_each_sequence, "they are others in each sequence"),
        (in_the_second_call, "some of its calls have them, and some have not"),
    ],
)
def test_a_scan_tells_learned_keys_that_it_does_not_read(attend: Any, why: str) -> None:
    with pytest.raises(SinkscopeError, match=f"^blocks.0.attn {REFUSED}{why}"):
        scanned(Writer(lambda: Beside(attend)), ids_of())


def test_a_number_of_learned_keys_that_grows_is_told() -> None:
    """Longer sequences than those of a dry run have more."""
    with pytest.raises(SinkscopeError, match=f"^blocks.0.attn {REFUSED}their number changes with that of the tokens"):
        scanned(writer(one_for_eight), ids_of())


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")
def test_zeros_that_may_be_padding_are_told() -> None:
    with torch.no_grad(), sinkscope.watch(model := Reader()) as seen:
        model(torch.randn(1, LENGTH, WIDTH), nn.functional.pad(torch.randn(1, 7, WIDTH), (0, 0, 1, 0)))
    with pytest.raises(SinkscopeError, match=f"{REFUSED}its first keys are zeros, which may be learned, or"):
        seen.run()


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")
@pytest.mark.parametrize("read", READ)
def test_learned_keys_that_torch_s_fused_layer_leaves_out_are_told(read: Any) -> None:
    """nn.TransformerEncoderLayer attends without them in eval mode, unless it is watched."""

    def layer() -> nn.Module:
        made = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        made.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
        return made

    with pytest.raises(SinkscopeError, match=rf"self_attn {REFUSED}torch's fused path"):
        _unchecked(read)(Writer(layer), ids_of(2, LENGTH))


def _unchecked(read: Any) -> Any:
    """The same without a look at the model's output."""
    if read is scanned:
        return read

    def run(model: nn.Module, ids: Tensor) -> Any:
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(ids)
        return seen.run()

    return run


class Stepping(nn.Module):
    """A layer that keeps the keys and values of its tokens in a tuple, and puts learned ones in front of them; zeros,
    where it has no other."""

    def __init__(self, zeros: bool, hand: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.n_head, self.hand = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS, hand
        self.beside = None if zeros else nn.Parameter(torch.randn(2, HEADS, 2, NARROW))

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        query, *new = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2))
        kept = new if past is None else [torch.cat(each, 2) for each in zip(past, new, strict=True)]
        learned = torch.zeros(2, HEADS, 1, NARROW) if self.beside is None else self.beside
        key, value = (torch.cat([own.expand(len(x), -1, -1, -1), each], 2)
                      for own, each in zip(learned, kept, strict=True))  # fmt: skip
        seen = torch.ones(x.shape[1], key.shape[2], dtype=torch.bool).tril(key.shape[2] - x.shape[1])
        if self.hand:
            maps = (query @ key.mT * NARROW**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
            mixed = maps @ value
        else:
            mixed = scaled_dot_product_attention(query, key, value, seen)
        return self.proj(mixed.transpose(1, 2).flatten(2)), kept


class Steps(nn.Module):
    """Two such layers, which return what they keep."""

    def __init__(self, zeros: bool, hand: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, WIDTH)
        self.layers = nn.ModuleList([Stepping(zeros, hand) for _ in range(2)])

    def forward(self, ids: Tensor, past: Any = (None, None)) -> tuple[Tensor, Any]:
        x, kept = self.tokens(ids), []
        for layer, own in zip(self.layers, past, strict=True):
            added, each = layer(x, own)
            x = x + added
            kept.append(each)
        return x, kept


@pytest.mark.parametrize("hand", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_steps_over_a_cache_with_learned_keys_are_one_pass(zeros: bool, hand: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, ids = Steps(zeros, hand).eval(), ids_of(2, LENGTH)
    with torch.no_grad(), sinkscope.watch(model) as whole:
        model(ids)
    with torch.no_grad(), sinkscope.watch(model) as stepped:
        past: Any = (None, None)
        for piece in ids.split([20, 1, 1, 2], 1):
            _, past = model(piece, past)
    assert not stepped.left_out
    assert_same(stepped.run(), whole.run())
    assert (whole.run().heads["learned_sink_mass"] > 0).all()

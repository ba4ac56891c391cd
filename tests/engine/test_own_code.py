"""Modules that attend in the styles people write: a watch and a scan give the columns of their float64 maps, or say in
a line what they do not read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from own_code import (
    READ,
    Attend,
    Attention,
    Writer,
    assert_float64,
    hidden,
    ids_of,
    maps_of,
    scanned,
    softmax,
    watched,
    writer,
)
from plain_models import HEADS, VOCABULARY, WIDTH, Reader, plain
from tiers import slow_but
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sinkscope
from sinkscope import SinkscopeError


def in_half(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends in bfloat16; what the projection reads is cast back."""
    query, key, value = (each.bfloat16() for each in (query, key, value))
    maps = softmax(query, key)
    module.note(softmax(query.double(), key.double()))
    return (maps @ value).to(module.proj.weight.dtype)


def zeroed(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Takes the attention to the first key away after the softmax."""
    maps = softmax(query, key)
    maps[..., 0] = 0
    return module.note(maps) @ value


@pytest.mark.parametrize("read", READ)
def test_an_output_that_is_cast_before_its_projection_is_read(read: type) -> None:
    model, ids = writer(in_half), ids_of()
    run = read(model, ids)
    assert run.heads["ov_drain"].notna().all()
    assert run.heads["honor"].notna().all()
    assert_float64(run, maps_of(model, ids), atol=2e-3)


def test_a_map_that_was_changed_after_its_softmax_passes_the_self_check() -> None:
    """The check computed it from the logits, which are no longer its own."""
    model, ids = writer(zeroed), ids_of()
    run = scanned(model, ids)
    assert run.manifest.self_check.status == "passed"
    assert (run.heads["bos_mass"] == 0).all()
    for layer, maps in enumerate(maps_of(model, ids)):
        own = maps.diagonal(0, -2, -1)[..., 1:].mean((0, 2))
        np.testing.assert_allclose(run.heads.query(f"layer == {layer}")["self_mass"], own, atol=1e-5)


def efficient(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention: softmaxes over the channels of q and over the positions of k."""
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def efficient_by_keys(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, with the products as diffusion models write them."""
    context = torch.einsum("bhdn,bhne->bhde", key.mT.softmax(-1), value)
    return torch.einsum("bhde,bhdn->bhen", context, query.mT.softmax(-2)).mT


@pytest.mark.parametrize("attend", [efficient, efficient_by_keys])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("length", [8, 48])
def test_a_softmax_over_channels_is_no_attention(attend: Attend, read: type, length: int) -> None:
    with pytest.raises(SinkscopeError, match=r"no attention of Writer|attention that is no map"):
        read(writer(attend), ids_of(3, length))


def in_chunks(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Four queries at a time, over all keys."""
    pieces = zip(query.split(4, 2), hidden(query.shape[2]).split(4), strict=True)
    return torch.cat(
        [(piece @ key.mT).masked_fill(later, -torch.inf).softmax(-1) @ value for piece, later in pieces], 2
    )


def in_slices(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Five queries at a time, over the keys up to the last of them; the last piece of a dry run is one query."""
    pieces = list[Tensor]()
    for start in range(0, query.shape[2], 5):
        stop = min(start + 5, query.shape[2])
        pieces.append(
            scaled_dot_product_attention(
                query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], attn_mask=~hidden(stop)[start:]
            )
        )
    return torch.cat(pieces, 2)


def over_channels(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """XCiT: channels attend to channels."""
    return ((query.mT @ key * module.proj.in_features**-0.5).softmax(-1) @ value.mT).mT


def over_channels_by_sdpa(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query.mT, key.mT, value.mT).mT


def of_every_second(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Even and odd positions attend among themselves."""
    both = [softmax(query[:, :, first::2], key[:, :, first::2]) @ value[:, :, first::2] for first in (0, 1)]
    return torch.stack(both, 3).flatten(2, 3)


@pytest.mark.parametrize("attend", [in_chunks, in_slices, over_channels, over_channels_by_sdpa, of_every_second])
def test_a_scan_leaves_out_what_is_no_whole_map(attend: Attend) -> None:
    with pytest.raises(SinkscopeError, match="no attention of Writer could be read"):
        scanned(writer(attend), ids_of())


def in_windows(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Windows of 24 positions as rows of the batch, in sequences that are as long."""
    width = min(24, query.shape[2])
    count = query.shape[2] // width
    query, key, value = (each.unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    return (softmax(query, key) @ value).unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def of_the_last(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last 24 positions attend among themselves, the others to nothing."""
    last = slice(-24, None)
    mixed = softmax(query[:, :, last], key[:, :, last]) @ value[:, :, last]
    return torch.nn.functional.pad(mixed, (0, 0, query.shape[2] - mixed.shape[2], 0))


@pytest.mark.parametrize("attend", [in_windows, of_the_last])
def test_parts_that_a_dry_run_is_too_short_for_are_told(attend: Attend) -> None:
    with pytest.raises(SinkscopeError, match=r"'blocks.0.attn' attends in parts of sequences as long as these"):
        scanned(writer(attend), ids_of())


def one_by_one(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A call for each sequence."""
    module.note(softmax(query, key))
    rows = zip(query.split(1), key.split(1), value.split(1), strict=True)
    return torch.cat([softmax(own_query, own_key) @ own_value for own_query, own_key, own_value in rows])


def test_a_call_for_each_sequence_is_read_in_batches_of_one() -> None:
    """Whatever batch size was asked for."""
    model, ids = writer(one_by_one), ids_of()
    run = scanned(model, ids)
    assert_float64(run, maps_of(model, ids))
    assert run.manifest.batch_size == 1


def keeping(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Puts the last eight keys and values of the call before in front."""
    queries, kept = query.shape[2], getattr(module, "kept", None)
    if kept is not None:
        key, value = (torch.cat(each, 2) for each in zip(kept, (key, value), strict=True))
    module.kept = key[:, :, -8:], value[:, :, -8:]
    later = torch.ones(queries, key.shape[2], dtype=torch.bool).triu(key.shape[2] - queries + 1)
    return (query @ key.mT).masked_fill(later, -torch.inf).softmax(-1) @ value


def test_a_scan_refuses_a_model_that_keeps_keys_of_earlier_passes() -> None:
    with pytest.raises(SinkscopeError, match=r"'blocks.0.attn' attends to keys of earlier passes"):
        scanned(writer(keeping), ids_of())


def test_a_prompt_of_zeros_is_no_learned_key() -> None:
    """A diffusion model's empty prompt has keys and values of 0."""
    with torch.no_grad(), sinkscope.watch(model := Reader()) as seen:
        model(torch.randn(1, 24, WIDTH), torch.zeros(1, 8, WIDTH))
    np.testing.assert_allclose(seen.run().heads["bos_mass"], 1 / 8, atol=1e-6)


def heads_first(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes with heads on the first axis and sequences on the second."""
    query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    return (softmax(query, key) @ value).transpose(0, 1)


@pytest.mark.parametrize(
    ("attend", "shape", "why"),
    [(heads_first, (HEADS, 20), "puts heads before sequences"), (over_channels, (3, 8), "attends among channels")],
)
def test_exchanged_axes_of_one_size_are_told(attend: Attend, shape: tuple[int, int], why: str) -> None:
    """As many sequences as heads, and as many positions as channels of a head."""
    with pytest.raises(SinkscopeError, match=f"blocks.0.attn {why}"):
        watched(writer(attend), ids_of(*shape))


def in_two_heads(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """XCiT in heads as wide as a dry run is long."""
    query, key, value = (each.unflatten(1, (2, 2)).transpose(2, 3).flatten(3) for each in (query, key, value))
    return over_channels(module, query, key, value).unflatten(3, (2, -1)).transpose(2, 3).flatten(1, 2)


def test_a_scan_tells_channels_from_as_many_positions() -> None:
    model = writer(in_two_heads)
    for block in model.blocks:
        block.attn.n_head = 2
    with pytest.raises(SinkscopeError, match=r"blocks.0.attn attends among channels"):
        scanned(model, ids_of(3, 16))


class SharedKeys(nn.Module):
    """Multi-query attention by einsum, whose keys and values have no axis of heads. `order`: the axes of q and o."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.n_head = order, HEADS
        self.query, self.shared, self.proj = (nn.Linear(WIDTH, width) for width in (WIDTH, WIDTH // 2, WIDTH))
        self.noted = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(2, (HEADS, -1))
        query = query if self.order == "bihd" else query.transpose(1, 2)
        key, value = self.shared(x).chunk(2, 2)
        logits = torch.einsum(f"{self.order},bjd->bhij", query, key) * key.shape[2] ** -0.5
        maps = logits.masked_fill(hidden(x.shape[1]), -torch.inf).softmax(-1)
        self.noted.append(maps.detach())
        mixed = torch.einsum(f"bhij,bjd->{self.order}", maps, value)
        written: Tensor = self.proj((mixed if self.order == "bihd" else mixed.transpose(1, 2)).flatten(2))
        return written


@pytest.mark.parametrize("order", slow_but(["bhid", "bihd"], "bihd"))
@pytest.mark.parametrize("shape", [(3, 48), (HEADS, HEADS)])
@pytest.mark.parametrize("read", READ)
def test_heads_that_share_their_keys_are_read(read: Any, shape: tuple[int, int], order: str) -> None:
    model, ids = Writer(lambda: SharedKeys(order)), ids_of(*shape)
    run = read(model, ids)
    assert_float64(run, maps_of(model, ids))
    assert run.heads[["qk_cos_other", "value_drain", "honor"]].notna().all(axis=None)


def by_distance(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Adds to logits and output what belongs to distances (Shaw et al.)."""
    apart = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    learned = (apart[..., None] * torch.arange(1.0, 9)).sin().to(query)
    logits = (query @ key.mT + torch.einsum("bhid,ijd->bhij", query, learned)) * query.shape[-1] ** -0.5
    maps = module.note(logits.masked_fill(hidden(query.shape[2]), -torch.inf).softmax(-1))
    return maps @ value + torch.einsum("bhij,ijd->bhid", maps, learned)


@pytest.mark.parametrize("read", READ)
def test_other_products_beside_those_of_queries_and_keys_are_none(read: Any) -> None:
    model, ids = writer(by_distance), ids_of()
    run = read(model, ids)
    assert_float64(run, maps_of(model, ids))
    assert run.heads[["qk_cos_other", "value_drain"]].notna().all(axis=None)


def sharing(heads: int) -> Attend:
    """The maps of the first heads, taken in turn for all."""

    def attend(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        maps = softmax(query[:, :heads], key[:, :heads]).repeat(1, HEADS // heads, 1, 1)
        return module.note(maps) @ value

    return attend


@pytest.mark.parametrize("read", READ)
def test_one_map_for_all_heads_is_each_head_s(read: Any) -> None:
    """A query that all heads share has columns of its own in each."""
    model, ids = writer(sharing(1)), ids_of()
    run = read(model, ids)
    assert_float64(run, maps_of(model, ids))
    assert run.heads[["qk_cos_other", "q_norm", "value_drain"]].notna().all(axis=None)
    assert (run.heads.groupby("layer")["q_norm"].nunique() == 1).all()


@pytest.mark.parametrize("read", READ)
def test_maps_that_some_heads_share_are_refused(read: Any) -> None:
    """Nothing tells which heads share one."""
    with pytest.raises(SinkscopeError, match=r"attention that is no map|no attention of Writer"):
        read(writer(sharing(2)), ids_of())


class Core(nn.Module):
    """Multiplies what another module has projected, and holds no weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return softmax(query, key) @ value


class AroundACore(Attention):
    """`gated`: halves what its core returns before it is projected."""

    def __init__(self, gated: bool) -> None:
        super().__init__(lambda module, query, key, value: self.core(query, key, value) * (0.5 if gated else 1.0))
        self.core = Core()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("read", slow_but(READ, watched))
def test_the_projection_beside_a_module_without_weights_is_found(read: Any, gated: bool) -> None:
    """Not where it reads something else than the heads."""
    expected = read(writer(lambda module, query, key, value: softmax(query, key) @ value), ids_of()).heads
    found = read(Writer(lambda: AroundACore(gated)), ids_of()).heads
    assert list(found["module"].unique()) == ["blocks.0.attn.core", "blocks.1.attn.core"]
    assert expected[["honor", "ov_drain"]].notna().all(axis=None)
    if gated:
        assert found[["honor", "ov_drain"]].isna().all(axis=None)
    else:
        pd.testing.assert_frame_equal(found.drop(columns="module"), expected.drop(columns="module"))


class OneLayer(nn.Module):
    """Attends in its own forward. `direct`: `out` reads the attention, else the states with what it added."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct, self.n_head = direct, HEADS
        self.tokens, self.qkv, self.out = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 7),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        query, key, value = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2))
        mixed = (softmax(query, key) @ value).transpose(1, 2).flatten(2)
        written: Tensor = self.out(mixed if self.direct else x + mixed)
        return written


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("read", READ)
def test_a_model_s_head_is_no_output_projection(read: Any, direct: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OneLayer(direct).eval()
    run = read(model, ids_of())
    assert run.heads["bos_mass"].notna().all()
    assert run.heads["ov_drain"].notna().all() == direct


def test_the_vocabulary_is_that_of_the_embedding_that_reads_the_ids() -> None:
    """The table of positions may have more rows, as in nanoGPT on characters: 65 tokens, 256 positions."""
    model, ids = plain(), ids_of()
    run = sinkscope.scan(model, data=ids, measure=("smoothing", "spikes"))
    assert run.smoothing["rank_w"].notna().all()
    ids[0, 3] = VOCABULARY
    with pytest.raises(SinkscopeError, match=f"{VOCABULARY}"):
        sinkscope.scan(model, data=ids)


class TimeFirst(Attention):
    """Is given time before sequences, and projects it so."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for each in self.qkv(x).split(WIDTH, 2))
        mixed: Tensor = self.proj(self.attend(self, query, key, value).permute(2, 0, 1, 3).flatten(2))
        return mixed


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TimeFirst(lambda module, query, key, value: softmax(query, key) @ value)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x.transpose(0, 1)).transpose(0, 1)
        return mixed


@pytest.mark.parametrize("shape", [(3, 12), (12, 12)])
def test_states_with_time_first_are_left_out_where_sizes_do_not_show_it(shape: tuple[int, int]) -> None:
    ids = ids_of(*shape)
    plain = watched(writer(lambda module, query, key, value: softmax(query, key) @ value), ids)
    turned = watched(Writer(Turned), ids)
    np.testing.assert_allclose(turned.heads["bos_mass"], plain.heads["bos_mass"], atol=1e-6)
    assert plain.layers["cos_first_input"].notna().all()
    if shape[0] == shape[1]:
        assert turned.layers["cos_first_input"].isna().all()
    else:
        np.testing.assert_allclose(turned.layers["cos_first_input"], plain.layers["cos_first_input"], atol=1e-6)
    np.testing.assert_allclose(turned.heads["honor"], plain.heads["honor"], rtol=1e-5)

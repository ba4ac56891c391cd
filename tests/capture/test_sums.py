"""Sums over tokens and queries: the compiled loops and torch, each against numpy in float64, and closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sinkscope.capture import loops
from sinkscope.capture.loops import mixes, normalised, vectors
from sinkscope.capture.token_sums import TokenSums, query_sums, token_sums
from sinkscope.wiring import folding
from sinkscope.wiring.added import ATTENTION, IDENTITY, UNIFORM, Added, read_added
from sinkscope.wiring.folded import FoldedHeads
from sinkscope.wiring.linear_maps import InputNorm


@pytest.fixture(autouse=True, scope="module", params=["torch", "compiled"])
def _computed_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here runs twice: computed by torch, and by the loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LEAST", 0 if request.param == "compiled" else math.inf)
        yield


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor | None, expected: np.ndarray | float, tolerance: float = 1e-5) -> None:
    assert ours is not None
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=tolerance, atol=tolerance / 10)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(2, 70), st.integers(0, 1000))
def test_tokens(batch: int, tokens: int, width: int, seed: int) -> None:
    x = draw(seed, batch, tokens, width) * 3 + draw(seed + 1, width)
    if tokens > 2:
        x[:, 2] = 0.0
    exact = x.double().numpy()
    sums = token_sums(x, whole=True)
    norms = np.linalg.norm(exact, axis=-1)
    close(sums.norms, norms)
    products = np.einsum("btd,bd->bt", exact, exact[:, 0])
    assert float(np.abs(sums.products.double().numpy() - products).max()) <= 1e-6 * float(norms.max()) ** 2
    close(sums.peaks, np.abs(exact).max(-1), 1e-7)
    centred = exact - exact.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        kurtosis = (centred**4).mean(-1) / (centred**2).mean(-1) ** 2 - 3
    close(sums.kurtosis, kurtosis)
    units = np.divide(exact, norms[..., None], out=np.zeros_like(exact), where=norms[..., None] > 0)
    total, counted = sums.unit_sum
    close(total, units[:, 1:].sum(1), 2e-5)
    close(counted, (norms[:, 1:] > 0).sum(-1))
    close(sums.first_cosines, np.einsum("btd,bd->bt", units, units[:, 0]), 2e-5)
    if tokens > 2:
        pairs = np.einsum("bid,bjd->bij", units[:, 1:], units[:, 1:])
        mean = (pairs.sum((1, 2)) - np.trace(pairs, axis1=1, axis2=2)) / ((tokens - 1) * (tokens - 2))
        close(sums.pair_cosine, mean, 2e-5)
    else:
        assert bool(sums.pair_cosine.isnan().all())


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 30), st.integers(1, 20), st.booleans(),
    st.integers(0, 1000),
)  # fmt: skip
def test_queries(batch: int, groups: int, repeat: int, queries: int, width: int, causal: bool, seed: int) -> None:
    query, key = draw(seed, batch, groups * repeat, queries, width), draw(seed + 1, batch, groups, queries, width)
    if queries > 3:
        query[:, 0, 2], key[:, 0, 3] = 0.0, 0.0
    q, k = query.double().numpy(), key.double().numpy().repeat(repeat, 1)
    sums = query_sums(query, key if causal else None)
    close(sums.norms, np.linalg.norm(q, axis=-1))

    def unit(x: np.ndarray) -> np.ndarray:
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        return np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)

    close(sums.unit_sum, unit(q)[:, :, 1:].sum(2), 2e-5)
    if causal:
        cosines = np.tril(np.einsum("bhid,bhjd->bhij", unit(q), unit(k)))
        close(sums.paired, cosines[..., 1:, 1:].sum((2, 3)), 3e-5)
    else:
        assert sums.paired is None


def test_closed_forms() -> None:
    """Signs alone: kurtosis -2, peak 1, norm sqrt(d); equal tokens have cosine 1."""
    signs = torch.tensor([1.0, -1.0]).repeat(8).expand(1, 5, 16).contiguous()
    sums = token_sums(signs, whole=True)
    close(sums.kurtosis, np.full((1, 5), -2.0), 1e-7)
    close(sums.peaks, np.ones((1, 5)), 1e-7)
    close(sums.norms, np.full((1, 5), 4.0), 1e-7)
    close(sums.first_cosines, np.ones((1, 5)), 1e-6)
    close(sums.pair_cosine, np.ones(1), 1e-6)


def test_nan_stays_nan_in_its_own_token() -> None:
    x = draw(0, 1, 6, 8)
    x[0, 3, 2] = math.nan
    sums = token_sums(x, whole=True)
    for facts in (sums.norms, sums.peaks, sums.kurtosis):
        assert facts.isnan()[0].tolist() == [False, False, False, True, False, False]


def test_the_loop_s_numbers_of_a_sequence_do_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAST", 0)
    x = draw(0, 3, 40, 24)
    both, alone = token_sums(x), token_sums(x[1:2])
    assert torch.equal(both.first_cosines[1:2], alone.first_cosines)


def test_only_float32_on_the_cpu_is_read_by_loops() -> None:
    assert not loops.reads(torch.zeros(2, dtype=torch.float64))
    assert not loops.reads(torch.zeros(2, device="meta"))
    assert token_sums(draw(0, 2, 5, 4).double()).norms.dtype == torch.float64


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_tokens_that_heads_add_to(groups: int, causal: bool, attends: bool) -> None:
    """Against the vectors themselves, formed whole. Values and queries lie in memory as models hold them."""
    heads, count, width, channels = 4, 9, 3, 5
    x, weights = draw(0, count, channels), draw(1, heads, width, channels)
    values, attended = draw(2, count + 1, groups, width).transpose(0, 1), draw(3, count, heads, width).transpose(0, 1)
    mean, roots = x.mean(0), torch.linalg.qr(weights.mT, mode="r").R
    read, repeated = torch.cat([x - mean, mean[None]]) @ weights.mT, values.repeat_interleave(heads // groups, dim=0)
    added = Added(read, x.double().square().sum(-1), values, repeated @ roots.mT, None, None, causal)
    if attends:
        added.attended, added.attended_out = attended, attended @ roots.mT
    added = read_added(added)
    tokens, exact, u = x.double().numpy(), weights.double().numpy(), repeated.double().numpy()
    steps = np.arange(1, count + 2)[:, None] if causal else count + 1
    uniform = u.cumsum(1) / steps if causal else np.broadcast_to(u.sum(1, keepdims=True) / steps, u.shape)
    mixed = {IDENTITY: u[:, 1:], UNIFORM: uniform[:, 1:], ATTENTION: attended.double().numpy()}
    assert len(added.units.weights) == len(added.units.change) == 2 + attends
    for mix in range(2 + attends):
        whole = tokens + mixed[mix] @ exact
        units = 1 / np.linalg.norm(whole, axis=-1)
        before, after = (np.einsum("hn,hnd->hd", units, rows) for rows in (np.broadcast_to(tokens, whole.shape), whole))
        close(added.units.weights[mix], units)
        close(added.units.change[mix], (after**2).sum(-1) - (before**2).sum(-1))
    written, average = u[:, 1:] @ exact, tokens.mean(0)
    close(added.around, np.einsum("nd,hnd->hn", tokens - average, written), 2e-5)
    close(added.along, np.einsum("d,hnd->hn", average, written), 2e-5)
    close(added.values_mean, u[:, 1:].mean(1))
    close(added.out_mean, (u[:, 1:] @ roots.double().numpy().swapaxes(1, 2)).mean(1))
    close(added.out_spread, ((written - written.mean(1, keepdims=True)) ** 2).sum(-1).mean(-1))


@pytest.mark.parametrize(("centred", "absent"), [(False, False), (True, False), (False, True)])
def test_tokens_and_what_the_norm_makes_of_them(centred: bool, absent: bool) -> None:
    """A norm's factor for each token is found from its output; a mean far from 0 leaves the digits of the spreads."""
    batch, count, width = 2, 7, 12
    gain, bias = (torch.ones(width), torch.zeros(width)) if absent else (draw(0, width), draw(1, width))
    x = draw(2, batch, count, width) + 30 * draw(3, width)
    exact = x.double().numpy()
    shift = exact.mean(-1, keepdims=True) if centred else np.zeros((batch, count, 1))
    factor = np.ones((batch, count, 1)) if absent else draw(4, batch, count, 1).double().numpy() / 30
    n = factor * (exact - shift)
    z = torch.from_numpy(gain.numpy() * n + bias.numpy()).float()
    sequences = [FoldedHeads(1, x=rows) for rows in x]
    norm = InputNorm(gain, bias, centred, absent)
    around = folding.read_tokens(sequences, x, z, norm)
    if around is not None:
        close(around[:, :-1], exact - exact.mean(1, keepdims=True), 1e-4)
        close(around[:, -1], exact.mean(1))
    for folded, own, tokens in zip(sequences, n, exact, strict=True):
        assert folded.affine is not None
        assert (folded.affine[1] is not None) == centred
        close(folded.z, own, 1e-4)
        own_apart, apart = own - own.mean(0), tokens - tokens.mean(0)
        close(folded.token_squares, (tokens**2).sum(-1))
        close(folded.spread, (own_apart**2).sum(-1).mean(), 1e-4)
        close(folded.beta, (own_apart * apart).sum() / (own_apart**2).sum(), 1e-4)
        close(folded.tokens_spread, (apart**2).sum(-1).mean(), 1e-4)
        close(folded.mean_square, (own.mean(0) ** 2).sum(), 1e-4)
        close(folded.tokens_mean_square, (tokens.mean(0) ** 2).sum())
        close(folded.unit_square, ((tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)).sum(0) ** 2).sum())


def test_a_zero_vector_has_no_unit_vector() -> None:
    sizes = torch.tensor([4.0, 0, 1]).double()
    nothing = torch.zeros(1, 4, 2)
    added = read_added(Added(nothing, sizes, nothing, nothing, nothing[:, 1:], nothing[:, 1:], causal=True))
    assert added.units.weights.tolist() == [[[0.5, 0, 1]]] * 3
    assert added.units.change.tolist() == [[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_the_loops_as_python_are_the_loops_as_compiled(causal: bool) -> None:
    x, query, key = draw(0, 3, 6, 5), draw(1, 2, 6, 3, 2, 5), draw(2, 2, 6, 3, 5)
    elements = draw(3, 3, 7 + causal)
    elements[1, 2] = math.nan
    found = []
    shapes = (4, 7, 5), (2, 7, 5), (4, 7, 3), (4, 6, 5), (4, 6, 3)  # read, values, out, attended, attended_out
    rows = [loops.rows(draw(4 + number, *shape)) for number, shape in enumerate(shapes)]
    every = vectors.read_tokens, vectors.read_queries, vectors.read_medians, mixes.add_mixes, normalised.read_normalised
    gain = np.full(5, 2.0, np.float32)
    for tokens, queries, middles, adding, normal in (every, [loop.py_func for loop in every]):
        added = [np.zeros(shape) for shape in ((3, 4, 6), (3, 4), (2, 4, 6), (4, 5), (4, 3), (4,))]
        medians = np.zeros(3, np.float32)
        facts, units = np.zeros((4, 3, 6), np.float32), np.zeros((3, 1, 6), np.float32)
        norms, sums, paired = (
            np.zeros((2, 3, 2, 6), np.float32),
            np.zeros((2, 3, 2, 5), np.float32),
            np.zeros((2, 3, 2)),
        )
        tokens_of = [np.zeros(shape, np.float32) for shape in ((2, 3, 6), (3, 6, 5), (3, 7, 5))]
        facts_of = [np.zeros((3, 6)), np.zeros((3, 6))]
        for turn in range(2):
            normal(*[loops.rows(x)] * 2, gain, gain, causal, False, *tokens_of, *facts_of, turn, 2)
            middles(elements.numpy(), medians, turn, 2)
            adding(*rows, 2, causal, np.full(6, 30.0), *added, turn, 2)
            tokens(x.numpy(), causal, facts, units, turn, 2)
            queries(query.numpy(), key.numpy(), causal, norms, sums, paired, turn, 2)
        found.append((facts, units, norms, sums, paired, *added, *tokens_of, *facts_of, medians))
    for compiled, plain in zip(*found, strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[0][-1], np.median(np.abs(elements.numpy()), axis=1))


def test_torch_computes_only_what_is_asked() -> None:
    sums = TokenSums(draw(0, 2, 5, 4))
    assert sums.norms.shape == (2, 5)
    assert set(vars(sums)) == {"_x", "norms"}

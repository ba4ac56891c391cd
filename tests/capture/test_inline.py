"""Attention in a model's own code: a model read through the interface and read inline gives the same columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exact import assert_close
from models import random_ids, tiny
from tiers import slow_but
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.overrides import _get_current_function_mode_stack
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from watched import find, hooks

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.metrics import registered

Style = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def by_matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    scores = q @ k.transpose(2, 3) * scaling
    return nn.Softmax(dim=-1)(scores.masked_fill(~mask, -1e4)) @ v


def by_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Folds heads into the batch; casts the probabilities and applies dropout."""
    fold = (q.shape[0] * q.shape[1], *q.shape[2:])
    scores = torch.bmm(q.reshape(fold), k.reshape(fold).mT) * scaling
    scores = scores + torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)[0]
    weights = torch.dropout(scores.softmax(-1).to(v.dtype), 0.1, False)
    return torch.bmm(weights, v.reshape(fold)).view(q.shape)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """As Bloom does: one call multiplies and adds a bias."""
    fold = (q.shape[0] * q.shape[1], *q.shape[2:])
    bias = torch.zeros(fold[0], fold[1], fold[1])
    scores = bias.baddbmm(batch1=q.reshape(fold), batch2=k.reshape(fold).mT, beta=1.0, alpha=scaling)
    weights = softmax(scores.view(*q.shape[:3], -1).masked_fill(~mask, -torch.inf), dim=3)
    return torch.bmm(weights.view(fold[0], fold[1], -1), v.reshape(fold)).view(q.shape)


def by_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """As XLNet does: positions are the first axis, the batch is the second."""
    q, k, v = (tensor.permute(2, 0, 1, 3) for tensor in (q, k, v))  # (T, B, H, d)
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * scaling
    scores = scores - 1e30 * (~mask).float()
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(dim=-1), v).permute(1, 2, 0, 3)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)


EVERY = registered().asked(())
STYLES: dict[str, Style] = {"matmul": by_matmul, "bmm": by_bmm, "baddbmm": by_baddbmm, "einsum": by_einsum}
STYLES["sdpa"] = by_sdpa


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Style], None]:
    """Makes every model in this process compute its attention inline, in a given style."""

    def use(style: Style) -> None:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
        ) -> tuple[Tensor, None]:
            repeat = query.shape[1] // key.shape[1]
            keys, values = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
            if mask is None:
                mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
            return style(query, keys, values, mask, scaling).transpose(1, 2).contiguous(), None

        monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attention)

    return use


@pytest.mark.parametrize("style", slow_but(STYLES, "bmm"))
def test_every_column_is_the_interface_s(style: str, inline: Callable[[Style], None]) -> None:
    model, ids = tiny("llama"), random_ids(3, 90)
    expected = sinkscope.scan(model, data=ids, batch_size=3)
    inline(STYLES[style])
    found = sinkscope.scan(model, data=ids, batch_size=3)
    assert {site.path for site in found.manifest.attention} == {"inline"}
    for name in [*EVERY.names("heads"), *EVERY.names("layers")]:
        ours, theirs = found.sequences[name].to_numpy(float), expected.sequences[name].to_numpy(float)
        assert_close(ours, theirs, f"{style} {name}", 2e-4, 2e-5)
    assert_close(found.positions["alpha_t64"].to_numpy(), expected.positions["alpha_t64"].to_numpy(), "", 1e-4, 1e-6)


@pytest.mark.parametrize("style", slow_but(STYLES, "einsum"))
def test_padding_counts_nowhere(style: str, inline: Callable[[Style], None]) -> None:
    model, lengths = tiny("llama"), (70, 41)
    rows = [random_ids(1, length, seed=length)[0].tolist() for length in lengths]
    inline(STYLES[style])
    both = sinkscope.scan(model, data=rows, batch_size=2).sequences
    for number, row in enumerate(rows):
        alone = sinkscope.scan(model, data=[row], self_check=False).sequences
        own = both[both["sequence"] == number]
        for name in ("bos_mass", "entropy", "sink_margin", "honor", "value_drain", "qk_cos_other", "logit_gap"):
            assert_close(own[name].to_numpy(float), alone[name].to_numpy(float), f"{style} {name}", 2e-4, 2e-5)


def test_logits_hidden_by_a_window_are_not_guessed(inline: Callable[[Style], None]) -> None:
    """Under a window the masked logits are lost, so logit_gap is missing; all other columns agree."""
    model, ids = tiny("mistral"), random_ids(2, 40)
    expected = sinkscope.scan(model, data=ids)
    inline(by_matmul)
    found = sinkscope.scan(model, data=ids)
    assert found.heads["logit_gap"].isna().all()
    assert expected.heads["logit_gap"].notna().all()
    for name in ("bos_mass", "sink_margin", "uniformity", "first_argmax", "gate_open", "ov_drain"):
        assert_close(found.heads[name].to_numpy(), expected.heads[name].to_numpy(), name, 2e-4, 2e-5)


@pytest.mark.slow
def test_learned_sinks_behind_the_keys(inline: Callable[[Style], None]) -> None:
    """A learned sink computed inline: one more logit, whose probability is dropped before the values."""

    def with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
        scores = (q @ k.mT * scaling).masked_fill(~mask, -torch.inf)
        weights = torch.cat([scores, torch.full_like(scores[..., :1], 1.0)], -1).softmax(-1)
        return weights[..., :-1] @ v

    inline(with_sink)
    run = sinkscope.scan(tiny("llama"), data=random_ids(2, 40))
    taken = run.heads["learned_sink_mass"]
    assert (taken > 0.01).all()
    assert (taken < 1).all()
    assert (run.heads["sink_margin"] < np.log(run.heads["sink_score"].max() / 1e-6)).all()
    rows = [random_ids(1, length, seed=length)[0].tolist() for length in (40, 23)]
    both, alone = (sinkscope.scan(tiny("llama"), data=data, self_check=False).sequences for data in (rows, rows[1:]))
    for name in ("learned_sink_mass", "sink_margin"):
        found, expected = both.loc[both["sequence"] == 1, name], alone[name]
        assert_close(found.to_numpy(float), expected.to_numpy(float), name, 1e-4, 1e-5)


def in_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Multiplies the map with values that have an axis more."""
    weights = (q @ k.mT * scaling).masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights.unsqueeze(1) @ v.unsqueeze(1)).squeeze(1)


def in_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Leaves out rows of the map before it is used."""
    scores = (torch.cat([q, q[:, :, -1:]], 2) @ k.mT) * scaling
    weights = scores.masked_fill(~torch.cat([mask, mask[:, :, -1:]], 2), -torch.inf).softmax(-1)
    return weights[:, :, :-1] @ v


def in_two_maps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """As low-rank approximations do: the product of two maps is no softmax."""
    weights = (q @ k.mT * scaling).masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ weights) @ v


@pytest.mark.parametrize("style", [in_groups, in_part, in_two_maps])
def test_a_map_that_does_not_fit_is_refused_not_guessed(style: Style, inline: Callable[[Style], None]) -> None:
    inline(style)
    with pytest.raises(sinkscope.SinkscopeError, match="no attention of LlamaModel could be read"):
        sinkscope.scan(tiny("llama"), data=random_ids(1, 20))


def test_tensors_that_do_not_fit_the_map_are_missing(inline: Callable[[Style], None]) -> None:
    """Scores of one query too many, cut off before the softmax; values that all sequences share."""

    def style(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
        scores = (torch.cat([q, q[:, :, -1:]], 2) @ k.mT)[:, :, :-1] * scaling
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[0]

    model, ids = tiny("llama"), random_ids(1, 30).expand(2, -1)
    expected = sinkscope.scan(model, data=ids, self_check=False)
    inline(style)
    found = sinkscope.scan(model, data=ids, batch_size=2, self_check=False)
    for name in ("bos_mass", "entropy", "sink_margin"):
        assert_close(found.heads[name].to_numpy(), expected.heads[name].to_numpy(), name, 2e-4, 2e-5)
    assert found.heads[["qk_cos_other", "value_drain"]].isna().all(axis=None)
    assert expected.heads[["qk_cos_other", "value_drain"]].notna().all(axis=None)


@pytest.mark.slow
def test_other_einsums_are_no_product(inline: Callable[[Style], None]) -> None:
    """An equation without an arrow, and one that sums an index of the queries alone: the map is read without them."""

    def style(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
        q = torch.einsum("bhtd,dz", q, torch.eye(q.shape[-1]))
        scores = torch.einsum("bhtdx,bhjd->bhtj", q[..., None], k) * scaling
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v

    model, ids = tiny("llama"), random_ids(1, 30)
    expected = sinkscope.scan(model, data=ids, self_check=False)
    inline(style)
    found = sinkscope.scan(model, data=ids, self_check=False)
    for name in ("bos_mass", "entropy", "value_drain"):
        assert_close(found.heads[name].to_numpy(), expected.heads[name].to_numpy(), name, 2e-4, 2e-5)
    assert found.heads["qk_cos_other"].isna().all()


class Routed(nn.Module):
    """A block with a router softmax, an output softmax and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).softmax(-1) * self.router(x).softmax(-1).amax(-1, keepdim=True)


def test_other_softmaxes_are_no_attention() -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="no attention of Routed could be read"):
        plan(Routed(), lambda: Routed()(torch.randn(1, 16, 8)))


def test_nothing_stays_after_an_exception(inline: Callable[[Style], None]) -> None:
    inline(by_matmul)
    model = tiny("llama")
    forward, found = find(model)
    before = hooks(model)

    def fail(view: Any, row: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), Capture(model, found, fail, 0.3).watching():
        forward(random_ids(1, 20))
    assert hooks(model) == before
    assert not _get_current_function_mode_stack()


def test_the_model_s_own_output_is_untouched(inline: Callable[[Style], None]) -> None:
    inline(by_bmm)
    model, ids = tiny("llama"), random_ids(2, 50)
    forward, found = find(model)
    with torch.no_grad():
        plain = forward(ids).last_hidden_state
        with Capture(model, found, lambda view, row: None, 0.3).watching():
            assert torch.equal(forward(ids).last_hidden_state, plain)

"""Every claim's verdict of whole models, from their weights through the scan to the rule.

Most are GPT-2s of one layer and one head, written down. LayerNorm leaves their embeddings as they are, so that logits
are products of vectors that are named here.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from models import random_ids, tiny
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trigger_models import relu_with_a_sink

from sinkscope.claims.claim import CLAIMS, FAILS, HOLDS
from sinkscope.claims.findings import judged
from sinkscope.claims.subject import Subject
from sinkscope.trigger.explicit import explicit
from sinkscope.trigger.model import plain_attention

WIDTH, BOS, VOCABULARY = 32, 0, 500
STRONG = 20.0
"""A logit on BOS, where all other keys have one of 0: 160 tokens get less than 1e-6 of a row."""
Make = Callable[[], Subject]


def of_length(rows: Tensor) -> Tensor:
    """The rows as LayerNorm leaves them, of mean 0 and variance 1."""
    rows = rows - rows.mean(-1, keepdim=True)
    return rows * WIDTH**0.5 / rows.norm(dim=-1, keepdim=True)


def embeddings(shared: float = 0.0) -> Tensor:
    """One row a token. BOS's is orthogonal to the others, or has this cosine with each of them."""
    rows = of_length(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)))
    first = rows[BOS] / rows[BOS].norm()
    rows = of_length(rows - (rows @ first)[:, None] * first)
    rows = (1 - shared**2) ** 0.5 * rows + shared * WIDTH**0.5 * first
    rows[BOS] = WIDTH**0.5 * first
    return rows


def on_one_axis() -> Tensor:
    """Tokens near to the two ends of one axis: a diagonal pattern has little to tell them apart by at any cost."""
    rows = embeddings()
    ends = torch.where(torch.arange(VOCABULARY) % 2 == 0, 1.0, -1.0)[:, None] * rows[5]
    axis = of_length(ends + 0.1 * rows)
    axis[BOS] = rows[BOS]
    return axis


def written(
    query: float = 0.0,
    *,
    own: float = 0.0,
    key: Tensor | None = None,
    value: Tensor | None = None,
    table: Tensor | None = None,
    positions: Tensor | None = None,
) -> Any:
    """The logit of every key is `query` times the share of BOS's direction in it, and `own` times its product with the
    query's token. `key` and `value` map embeddings, or are the identity."""
    rows = embeddings() if table is None else table
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=WIDTH, n_layer=1, n_head=1, bos_token_id=BOS, eos_token_id=1,
        layer_norm_epsilon=1e-9,
    ))  # fmt: skip
    block, eye = model.transformer.h[0], torch.eye(WIDTH)
    maps = (own * eye, eye if key is None else key, eye if value is None else value)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(rows)
        model.transformer.wpe.weight.copy_(torch.zeros(256, WIDTH) if positions is None else positions)
        block.attn.c_attn.weight.copy_(torch.cat([each.T for each in maps], 1))
        block.attn.c_attn.bias.zero_()
        block.attn.c_attn.bias[:WIDTH] = query * AXIS
        block.attn.c_proj.weight.copy_(eye)
        block.mlp.c_proj.weight.zero_()
    return model.eval()


AXIS = embeddings()[BOS] / WIDTH**0.5
"""BOS's direction."""
ON_AXIS = torch.outer(AXIS, AXIS)
NO_BOS = torch.eye(WIDTH) - ON_AXIS
"""A value map that leaves nothing of BOS."""


def by_sigmoid(model: Any) -> Any:
    """The model with the sigmoid of each logit in place of the softmax, divided by nothing."""

    def named(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, given | {"score": "sigmoid"}

    ALL_ATTENTION_FUNCTIONS.register("scored", plain_attention)
    model.config._attn_implementation = "scored"
    model.transformer.h[0].attn.register_forward_pre_hook(named, with_kwargs=True)
    return model


def at_the_first_position() -> Any:
    """What stands at position 0 has BOS's direction, and the token BOS is like any other."""
    rows, positions = embeddings(), torch.zeros(256, WIDTH)
    rows[BOS] = of_length(torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)))
    positions[0] = 3 * WIDTH**0.5 * AXIS
    return written(STRONG, table=rows, positions=positions)


def of_bos_alone() -> Any:
    """A model whose head writes token 7's embedding wherever it reads BOS, so that 7 is the likeliest next token."""
    rows = embeddings()
    return written(STRONG, value=torch.outer(rows[7], AXIS) / WIDTH**0.5)


def with_a_value_for_bos() -> Any:
    """The trigger task's closed form, which writes where it rests, too."""
    network = deepcopy(explicit("softmax"))
    with torch.no_grad():
        network.layers[0].self_attn.v_proj.weight[3, 0] = 1.0
    return network


def ids(first: tuple[int, ...] = (BOS,), length: int = 160) -> Tensor:
    """Three sequences with these first tokens, and then tokens of which none comes twice in a sequence."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(VOCABULARY - 10, generator=generator)[: length - len(first)] + 10 for _ in range(3)]
    return torch.cat([torch.tensor([first] * 3), torch.stack(rows)], 1)


def repeated(*tokens: int) -> Tensor:
    """BOS, then these tokens again and again."""
    return torch.tensor([[BOS, *(tokens * 8)]] * 3)


def reads(model: Callable[[], Any], data: Tensor | None = None) -> Make:
    return lambda: Subject("a model", model(), reading={"data": ids() if data is None else data})


def reads_text(model: Callable[[], Any]) -> Make:
    words = {"data": "prose", "num_sequences": 8, "seq_len": 64}
    return lambda: Subject("a model", model(), reading=words, loading={"tokenizer": make_tokenizer()})


def task(model: Callable[[], Any]) -> Make:
    return lambda: Subject("a model", model(), reading={"num_sequences": 20})


def packaged(name: str) -> Make:
    return lambda: Subject(name, f"example:{name}")


def sink(**changed: Any) -> Callable[[], Any]:
    return lambda: written(**({"query": STRONG} | changed))


CASES: dict[str, tuple[list[Make], list[Make]]] = {
    "softmax-needs-a-sink": (
        [task(lambda: explicit("softmax")), packaged("trigger-softmax")],
        [task(lambda: explicit("softmax", heads=2))],
    ),
    "relu-needs-none": ([task(lambda: explicit("relu")), packaged("trigger-relu")], [task(relu_with_a_sink)]),
    "off-rests-on-a-sink": (
        [task(lambda: explicit("softmax")), reads(sink(value=NO_BOS)), packaged("trigger-softmax")],
        [reads(written)],  # uniform attention to tokens at random: what it writes is close to 0, far from any sink
    ),
    "heads-compensate": (
        [task(lambda: explicit("softmax", heads=2))],
        [reads(lambda: tiny("gpt2"), random_ids(2, 80))],
    ),
    "hard-switch": (
        [task(lambda: explicit("softmax")), reads(sink(value=NO_BOS)), packaged("trigger-softmax")],
        [task(with_a_value_for_bos), reads(sink())],
    ),
    "alignment": (
        [reads(lambda: written(STRONG, table=embeddings(shared=0.5)), repeated(*range(10, 18)))],
        [reads(sink())],  # 159 tokens around 0 in 31 dimensions: no W has a margin for all of them as queries
    ),
    "cosines": ([reads(lambda: written(STRONG, table=embeddings(shared=0.5)))], [reads(sink())]),
    "sink-is-cheaper": (
        [reads(sink()), packaged("trigger-softmax")],
        [reads(lambda: written(STRONG, table=on_one_axis()))],
    ),
    "self-talk-is-an-mlp": (
        [reads(lambda: written(own=3.0))],
        # BOS stands at position 1: half of each row goes to the query's own token, which has no value, and half to it
        [reads(lambda: written(8.2, own=1.5, value=ON_AXIS), ids((2, BOS)))],
    ),
    "dense-smooths-more": (
        [reads(sink(value=NO_BOS)), packaged("trigger-softmax")],
        [reads(sink())],  # all tokens get BOS's vector, which is as smooth as can be; the condition speaks of none
    ),
    "first-token": ([reads(sink()), reads_text(sink())], [reads(written)]),
    "falls-with-length": ([reads(lambda: written(2.5))], [reads(sink())]),
    "stays-at-the-first-position": ([reads_text(at_the_first_position)], [reads_text(sink())]),
    "key-bias": (
        [reads(lambda: written(2 * STRONG, key=torch.eye(WIDTH) - 0.5 * ON_AXIS))],
        [reads(lambda: written(STRONG, key=torch.eye(WIDTH) + ON_AXIS)), packaged("trigger-softmax")],
    ),
    "value-is-not-needed": ([reads(sink(value=NO_BOS))], [reads(of_bos_alone, repeated(7, 7, 7, 7))]),
    "needs-normalisation": (
        [reads(lambda: by_sigmoid(written(-STRONG)))],
        [reads(lambda: by_sigmoid(written(STRONG)))],
    ),
}
FAST = {
    ("first-token", HOLDS), ("first-token", FAILS), ("hard-switch", HOLDS), ("hard-switch", FAILS),
    ("relu-needs-none", HOLDS), ("stays-at-the-first-position", HOLDS), ("value-is-not-needed", HOLDS),
}  # fmt: skip
"""Claims whose measurements differ: columns, a question, the trigger task, texts with other first tokens, arms. What
the rule of every claim says about its numbers, either way, is in test_verdicts.py."""
EACH = [  # the first models of these are among the fast tests
    pytest.param(
        name,
        verdict,
        make,
        id=f"{name}-{verdict}-{place}",
        marks=[pytest.mark.slow] * (place > 0 or (name, verdict) not in FAST),
    )
    for name, both in CASES.items()
    for verdict, made in zip((HOLDS, FAILS), both, strict=True)
    for place, make in enumerate(made)
]


def test_every_claim_has_a_model_of_either_verdict() -> None:
    assert {name for name in CLAIMS if CLAIMS.ships(name)} == set(CASES)
    assert all(holds and fails for holds, fails in CASES.values())


@pytest.mark.parametrize(("name", "verdict", "make"), EACH)
def test_the_verdict_of_a_model(name: str, verdict: str, make: Make) -> None:
    found, numbers = judged(CLAIMS[name], make())
    assert found == verdict, numbers

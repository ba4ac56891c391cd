"""Small models in plain torch, one for each way in which a module may attend without transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WAYS = ("sdpa", "product", "multi_head", "flex")
WIDTH, HEADS, VOCABULARY = 32, 4, 61


class Attention(nn.Module):
    """Causal self-attention in one of WAYS."""

    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.way, self.n_head, self.dropout = way, HEADS, dropout
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.c_attn(x).split(WIDTH, 2)
        )
        dropped = self.dropout if self.training else 0.0
        if self.way == "sdpa":
            mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        elif self.way == "flex":
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(x.device))
            mixed = flex_attention(query, key, value, block_mask=mask)
        else:
            logits = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = functional.softmax(logits.masked_fill(later, -torch.inf), dim=-1)
            mixed = functional.dropout(weights, self.dropout, self.training) @ value
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class MultiHead(nn.Module):
    """torch's own attention module, causal."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed: Tensor = self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        return mixed


class Block(nn.Module):
    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.attn: nn.Module = MultiHead(dropout) if way == "multi_head" else Attention(way, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        mixed: Tensor = x + self.narrow(functional.gelu(self.wide(x)))
        return mixed


class Plain(nn.Module):
    """A causal language model of two blocks, without a configuration of transformers."""

    def __init__(self, way: str = "sdpa", dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(128, WIDTH)
            self.blocks = nn.ModuleList([Block(way, dropout) for _ in range(2)])
            self.head = nn.Linear(WIDTH, VOCABULARY)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(way: str = "sdpa", dropout: float = 0.0) -> Plain:
    """A model in eval mode; all ways have the same kind of weights."""
    return Plain(way, dropout).eval()


def tokens(batch: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    """Random token ids, [batch, length]."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


class Reader(nn.Module):
    """Reads a prompt by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                   for part in (self.query(x), self.key(prompt), self.value(prompt)))  # fmt: skip
        read: Tensor = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return read

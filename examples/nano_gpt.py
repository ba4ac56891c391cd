"""A nanoGPT in plain torch, watched while it runs: which heads attend to the first token?"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import sinkscope


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def train(model: GPT, label: Callable[[str], None]) -> None:
    """60 steps over one text; `label` is told every twentieth."""
    text = "the first token of a text is seen by every later one. " * 4
    ids = torch.tensor([list(text.encode())])
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(60):
        if step % 20 == 0:
            label(f"step {step}")
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits[0], ids[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    with sinkscope.watch(model, every=20) as seen:
        train(model, seen.label)
    run = seen.run()
    print("bos_mass, the mean attention of a head on the first token, as the model trains:")
    print(run.heads.pivot_table("bos_mass", ["layer", "head"], "domain", sort=False).round(3).to_string())


if __name__ == "__main__":
    main()

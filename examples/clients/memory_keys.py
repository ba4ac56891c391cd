"""A decoder of x-transformers with three memory keys in each head, random weights, writes over its own cache."""

from typing import Any

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper


def load(flash: bool = True) -> Any:
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=3, heads=4, attn_dim_head=16, attn_num_mem_kv=3, attn_flash=flash)
    return TransformerWrapper(num_tokens=61, max_seq_len=64, attn_layers=layers).eval()


@torch.no_grad()
def work(model: Any) -> torch.Tensor:
    """The token ids of prompt and answer, (1, tokens)."""
    prompt = torch.randint(61, (1, 20), generator=torch.Generator().manual_seed(1))
    answer = AutoregressiveWrapper(model).generate(prompt, 12, temperature=0.0, cache_kv=True)
    return torch.cat([prompt, answer], 1)


if __name__ == "__main__":
    print(*work(load())[0].tolist())

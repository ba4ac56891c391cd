"""A ViT of timm with a class token and four registers, random weights, looks at three pictures of noise."""

from typing import Any

import timm
import torch


def load() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_small_patch14_reg4_dinov2", img_size=98, num_classes=10).eval()


@torch.no_grad()
def work(model: Any) -> torch.Tensor:
    """The logits of each picture's classes, (3, 10)."""
    pictures = torch.randn(3, 3, 98, 98, generator=torch.Generator().manual_seed(1))
    found: torch.Tensor = model(pictures)
    return found


if __name__ == "__main__":
    for scores in work(load()):
        print("class", int(scores.argmax()), f"score {scores.max():.3f}")

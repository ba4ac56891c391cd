"""A small DiT of diffusers, random weights, takes noise off a picture in four steps, each a condition of the run."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel

import sinkscope


def load() -> Any:
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=4, sample_size=16, patch_size=2,
        num_embeds_ada_norm=1000,
    ).eval()  # fmt: skip


@torch.no_grad()
def work(model: Any, label: Callable[[str], None]) -> torch.Tensor:
    """The picture, (1, 4, 16, 16). `label` is told each step."""
    scheduler = DDIMScheduler(num_train_timesteps=1000)
    scheduler.set_timesteps(4)
    picture = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    for time in scheduler.timesteps:
        label(f"t={int(time)}")
        noise = model(picture, timestep=time[None], class_labels=torch.tensor([7])).sample
        picture = scheduler.step(noise, time, picture).prev_sample
    return picture


if __name__ == "__main__":
    transformer = load()
    with sinkscope.watch(transformer) as seen:
        made = work(transformer, seen.label)
    print(f"a picture {tuple(made.shape)}, mean {made.mean():.3f}, deviation {made.std():.3f}")
    seen.run().save("runs/diffusers")

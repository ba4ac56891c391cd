"""The dtype of weights that transformers has made of codes, as of FP8 and MXFP4 where no GPU reads them."""

from __future__ import annotations

import torch
from torch import nn

from sinkscope.checkpoints.private_doors import kept_in_float32


def give_asked_dtype(model: nn.Module) -> None:
    """Gives the weights of a loaded model the dtype that its loading asked for, in place.

    transformers 5.17 leaves those whose names it changes in the dtype of the files, and MXFP4's in bfloat16: the model
    would compute in another dtype than was asked for, or in two. Those that it keeps in float32 on purpose stay so.
    """
    asked = getattr(model.config, "dtype", None)
    if not isinstance(asked, torch.dtype):
        return
    kept = kept_in_float32(model, asked)
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            # an offloaded weight has no numbers here: accelerate fetches them in the dtype that stands here
            weight.data = weight.data.to(torch.float32 if kept(name) else asked)

"""Keeps what the output projection reads and returns, beside the attention call that it follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.cuts import Pending
from sinkscope.capture.plan import INLINE


def keep_read(pending: Pending | None, args: tuple[Any, ...]) -> None:
    """Keeps the projection's input as w, where it has the shape of the call's output."""
    if pending is None or pending.output is None or not args or args[0].numel() != pending.output.numel():
        return
    read = args[0].reshape(pending.output.shape)
    # The interface fixes the layout (B, T, H * dv). A model's own code may use another, so values are compared.
    if pending.site.path != INLINE or torch.allclose(read, pending.output, rtol=1e-3, atol=1e-6):
        pending.projected = read


def keep_written(pending: Pending | None, output: Any, bias: Tensor) -> None:
    """Keeps the projection's output less its `bias` (D), where its input was kept: the sum over heads of W_O^h w_i."""
    written = output[0] if isinstance(output, tuple) else output
    if pending is not None and pending.projected is not None and written.shape[:-1] == pending.rows:
        pending.written = written - bias.to(written.device, written.dtype)

"""Computes one softmax attention call with the Triton kernels: the results of `walk`, without logits in memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.sums import EARLY, AttentionSums, block_edges
from sinkscope.capture.kernels.walk import FLOOR, linear_gap
from sinkscope.capture.masks.visibility import BlockMask


@dataclass(frozen=True)
class Tiles:
    """A tile's queries and keys in both kernels, the channels multiplied at once, the warps, and the pipeline stages of
    `row_sums` and of `column_sums`."""

    queries: int
    keys: int
    slice: int
    warps: int
    stages: int
    column_stages: int


def tiles(dtype: torch.dtype, width: int, masked: bool, capped: bool, hopper: bool) -> Tiles:
    """The tile for a dtype and a width: the largest of q, k and v, rounded up to a power of two. `masked`: a mask or a
    bias is read beside the keys. `hopper`: the GPU is an H100, an H200 or their kin.

    The choice is fixed, not tuned at run time, so that results are the same bytes each time. docs/speed.md says what it
    takes. A tile of 128 queries would read keys half as often, but spills registers; of float32, one of 64 queries
    does, too. A second stage, which loads keys while others are multiplied, spills in `row_sums` where a mask is loaded
    ahead as well. Float32 products run without tensor cores, from registers, a slice of the channels at a time. So do
    the widest heads, whose channels do not fit into shared memory together. A Hopper multiplies for four warps at once:
    on an H200, both kernels together took 0.54 to 0.69 of the time with the tiles that suit it.
    """
    if dtype == torch.float32:
        if width > 256:
            return Tiles(32, 16, 32, 8, 1, 1)
        if width > 128:
            return Tiles(64, 32, 32, 8, 1, 1)
        return Tiles(32, 32, 16, 4 if width <= 64 else 8, 1, 1)
    if width > 256:
        return Tiles(32, 32, 64, 8, 1, 1)
    if hopper and not masked and not capped:
        return Tiles(64, 32, width, 4, 2, 2) if width > 128 else Tiles(64, 32, width, 4, 3, 3)
    return Tiles(64, 32, width, 8, 1 if masked and width > 64 else 2, 2)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU has compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def power(width: int) -> int:
    """The smallest power of two that is at least `width` and at least 16, the minimum of a matrix product in Triton."""
    return max(16, 1 << (width - 1).bit_length())


def visible_tiles(hidden: Bool[Tensor, "b h query key"], cut: Tiles) -> Bool[Tensor, "query_block key_block"]:
    """Which tiles hold a pair (query, key) that is seen in some sequence and head."""
    pairs = ~hidden.all(dim=1).all(dim=0)
    pairs = pad(pairs, (0, -pairs.shape[1] % cut.keys, 0, -pairs.shape[0] % cut.queries))
    return pairs.unflatten(1, (-1, cut.keys)).any(-1).unflatten(0, (-1, cut.queries)).any(1)


@lru_cache(maxsize=64)
def reach_without_mask(
    rows: range, columns: range, triangle: bool, of_queries: bool, cut: Tiles, device: torch.device
) -> Int[Tensor, "block two"]:
    """`reach` of the blocks of queries or of keys where no mask is read. All layers and batches share it."""
    visible = visible_tiles_without_mask(rows, columns, triangle, cut, device)
    return reach(visible if of_queries else visible.T)


def visible_tiles_without_mask(
    rows: range, columns: range, triangle: bool, cut: Tiles, device: torch.device
) -> Bool[Tensor, "query_block key_block"]:
    """Which tiles of queries `rows` and keys `columns` hold a pair that is seen. A query sees every key, or with
    `triangle` every key that is not later than itself."""
    last = torch.arange(rows.start, rows.stop, cut.queries, device=device)[:, None] + (cut.queries - 1)
    first = torch.arange(columns.start, columns.stop, cut.keys, device=device)
    return first <= last if triangle else torch.ones(len(last), len(first), dtype=torch.bool, device=device)


def reach(visible: Bool[Tensor, "block other"]) -> Int[Tensor, "block two"]:
    """For each block of queries, the first and the end of the key blocks that it sees (or, transposed, the query blocks
    of each key block); 0 and 0 where there are none."""
    index = torch.arange(visible.shape[1], device=visible.device)
    last = torch.where(visible, index + 1, 0).amax(1)
    first = torch.where(visible, index, visible.shape[1]).amin(1)
    return torch.stack([torch.minimum(first, last), last], 1).int()


# Computes one softmax attention call with the Triton kernels: the results of `walk`, without logits in memory.
#
# Each range of queries takes two launches: `row_sums` (output and row sums), then `column_sums`. A call without a mask,
# or with a purely causal one, has two ranges: queries 0..63, after which the early column sums are copied, and all
# others. With any other mask the ranges are narrow strips, so that no temporary is as large as the mask.


WIDEST, WIDEST_VALUE = 576, 512
"""The largest width of queries and keys, which are multiplied slice by slice, and of values, whose sums of a whole tile
stand in registers. Both are those of latent attention with absorbed projections."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNDERSTOOD = frozenset({
    *("query", "key", "value", "mask", "causal", "scaling", "softcap", "bias", "sinks", "window", "learned"),
})  # fmt: skip
"""The fields of a call that the kernels compute; a call that sets another one is left to `walk`."""
ROW_SUMS = ("first", "entropy", "margin", "learned_sink", "largest", "logit_gap", "diagonal", "previous")
"""The planes that the kernel `row_sums` writes, in its order. With learned sinks, `row_total` follows."""
NO_GAP, CAUSAL_GAP, SEEN_GAP, FULL_GAP = range(4)
"""The keys whose logits `logit_gap` averages: none (linear logits use `linear_gap`), those up to the query, those that
it sees, or all."""


def supports(call: AttentionCall) -> bool:
    """Whether the kernels can compute this call, on any device: softmax, one dtype of DTYPES, widths up to WIDEST and
    WIDEST_VALUE, no gradients."""
    tensors = (call.query, call.key, call.value)
    return (
        not call.beyond(UNDERSTOOD)
        and call.query.dtype in DTYPES
        and all(tensor.dtype == call.query.dtype for tensor in tensors)
        and all(tensor.numel() > 0 for tensor in tensors)
        and call.query.shape[-1] <= WIDEST
        and call.value.shape[-1] <= WIDEST_VALUE
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def attend(call: AttentionCall) -> tuple[Tensor, AttentionSums]:
    """Returns the output (B, Tq, H, dv) and float32 sums of a call that `supports` accepts.

    Raises whatever Triton raises where it cannot compile or launch a kernel.
    """
    device = call.query.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch = _Launch(call)
        for start, stop in launch.edges():
            launch.treat(start, stop)
        return launch.output, launch.sums()


class _Launch:
    """One call's tensors in the form that the kernels take, and the sums that the kernels fill."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.batch, self.heads, self.queries, self.width = call.query.shape
        self.keys, self.value_width = call.key.shape[2], call.value.shape[-1]
        self.inputs = [_dense(tensor) for tensor in (call.query, call.key, call.value)]
        self.triangle = call.visible.triangle and not call.visible.whole
        self.masked = not (call.visible.triangle or call.visible.whole)
        self.padded_value = power(self.value_width)
        masked = self.masked or call.bias is not None
        width = max(power(self.width), self.padded_value)
        self.tiles = tiles(call.query.dtype, width, masked, call.softcap is not None, is_hopper(call.query.device))
        self.slice = min(self.tiles.slice, power(self.width))
        self.padded = -(-self.width // self.slice) * self.slice  # a whole number of slices
        self.sinks = None
        if call.sinks is not None:  # several sink logits are equivalent to one: their log-sum-exp
            joined = call.sinks.float().logsumexp(-1).clamp(min=FLOOR)
            self.sinks = joined.expand(self.batch, self.heads, self.queries)
        zeros = call.query.new_zeros
        planes = len(ROW_SUMS) + (self.sinks is not None)
        self.rows = zeros(planes, self.batch, self.heads, self.queries, dtype=torch.float32)
        self.peaks = zeros(2, self.batch, self.heads, self.queries, dtype=torch.float32)
        self.columns = zeros(self.batch, self.heads, self.keys, dtype=torch.float32)
        self.early: Tensor | None = None
        self.output = call.query.new_empty(self.batch, self.queries, self.heads, self.value_width)

    def edges(self) -> list[tuple[int, int]]:
        """The ranges of queries, with an edge at EARLY."""
        if not self.masked:
            return [(0, EARLY), (EARLY, self.queries)] if self.queries > EARLY else [(0, self.queries)]
        shared_batch, shared_heads, _ = self.call.visible.counts.shape
        entry = 6 if self.call.visible.has_bias else 2  # bytes in a strip for each pair: bools, a float32 bias
        return block_edges(self.queries, shared_batch * shared_heads * self.keys * entry, self.call.query.device)

    def treat(self, start: int, stop: int) -> None:
        """Runs both kernels over queries start..stop and the keys that these may see."""
        call, visible = self.call, self.call.visible
        if self.masked:
            seen = visible.block(start, stop, whole=not call.linear)
        else:
            seen = BlockMask(0, min(stop, self.keys) if self.triangle else self.keys, (), None)
        gap = NO_GAP
        if not call.linear:
            gap = SEEN_GAP if seen.bias is not None else CAUSAL_GAP if visible.causal else FULL_GAP
        hidden = seen.hidden
        rows, columns = range(start, stop), range(seen.low, seen.high)
        if hidden is None:
            blocks = [self._reach(rows, columns, self.triangle, of_queries) for of_queries in (True, False)]
        else:  # the kernels load only tiles that hold a pair that is seen
            there = visible_tiles(hidden, self.tiles)
            blocks = [reach(there), reach(there.T)]
        if gap in (CAUSAL_GAP, FULL_GAP):  # the mean of logits includes keys that a window hides
            blocks[0] = self._reach(rows, columns, gap == CAUSAL_GAP, True)
        bias = self._bias(start, stop, seen)
        shape = (self.batch, self.heads, stop - start, seen.high - seen.low)
        masks = (_tile(hidden, shape, call.query), _tile(bias, shape, call.query))
        sizes = (start, stop - start, seen.low, seen.high - seen.low, call.scaling, call.softcap or 1.0)
        flags: dict[str, Any] = {
            "CAUSAL": self.triangle,
            "HIDDEN": hidden is not None,
            "BIAS": bias is not None,
            "SOFTCAP": call.softcap is not None,
            "WIDTH": self.width,
            "BLOCK_M": self.tiles.queries,
            "BLOCK_N": self.tiles.keys,
            "BLOCK_D": self.padded,
            "SLICE": self.slice,
            "num_warps": self.tiles.warps,
            "enable_fp_fusion": True,  # set explicitly, since the default changes with Triton's version
        }
        self._row_sums(masks, sizes, blocks[0], flags | {"GAP": gap, "FIRST": seen.low == 0})
        self._column_sums(masks, sizes, blocks[1], flags)
        if stop == EARLY:
            self.early = self.columns[..., :EARLY].clone()

    def _reach(self, rows: range, columns: range, triangle: bool, of_queries: bool) -> Tensor:
        return reach_without_mask(rows, columns, triangle, of_queries, self.tiles, self.call.query.device)

    def _bias(self, start: int, stop: int, seen: BlockMask) -> Tensor | None:
        """The bias added to the strip's logits: the call's, the mask's, or their sum."""
        if self.call.bias is None:
            return seen.bias
        bias = self.call.bias.expand(-1, -1, self.queries, -1)[..., start:stop, seen.low : seen.high]
        return bias if seen.bias is None else bias.float() + seen.bias

    def _row_sums(self, masks: tuple[Any, ...], sizes: tuple[Any, ...], blocks: Tensor, flags: dict[str, Any]) -> None:
        from sinkscope.capture.kernels.triton_kernels import row_sums

        query, key, value = self.inputs
        (hidden, hidden_strides), (bias, bias_strides) = masks
        sinks = query if self.sinks is None else self.sinks
        row_sums[(len(blocks) * self.batch * self.heads,)](
            query, key, value, self.output, self.rows, self.peaks, hidden, bias, sinks, blocks,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *hidden_strides, *bias_strides,
            *((0, 0, 0) if self.sinks is None else self.sinks.stride()),
            self.heads, self.heads // key.shape[1], self.queries, self.peaks[0].numel(), *sizes, **flags,
            SINKS=self.sinks is not None, SQUARE=self.call.square, VALUE_WIDTH=self.value_width,
            BLOCK_V=self.padded_value,
            num_stages=self.tiles.stages,
        )  # fmt: skip

    def _column_sums(
        self, masks: tuple[Any, ...], sizes: tuple[Any, ...], blocks: Tensor, flags: dict[str, Any]
    ) -> None:
        from sinkscope.capture.kernels.triton_kernels import column_sums

        query, key, _ = self.inputs
        (hidden, hidden_strides), (bias, bias_strides) = masks
        column_sums[(len(blocks) * self.batch * self.heads,)](
            query, key, self.peaks, self.columns, hidden, bias, blocks,
            *query.stride()[:3], *key.stride()[:3], *hidden_strides, *bias_strides,
            self.heads, self.heads // key.shape[1], self.queries, self.keys, self.peaks[0].numel(), *sizes, **flags,
            num_stages=self.tiles.column_stages,
        )  # fmt: skip

    def sums(self) -> AttentionSums:
        """The call's sums, complete after the last range."""
        call = self.call
        rows = dict(zip((*ROW_SUMS, "row_total"), self.rows, strict=False))
        return AttentionSums(
            first=rows["first"],
            diagonal=rows["diagonal"] if call.square else None,
            previous=rows["previous"] if call.square else None,
            entropy=rows["entropy"],
            margin=rows["margin"],
            learned_sink=rows["learned_sink"],
            first_is_largest=rows["largest"] > 0,
            logit_gap=linear_gap(call, torch.float32) if call.linear else rows["logit_gap"],
            columns=self.columns,
            early_columns=self.early,
            visible=call.visible.counts,
            sees_first=call.visible.sees_first,
            sees_few=call.visible.sees_few,
            seen_by=call.visible.seen_by,
            early_seen_by=call.visible.seen_by_first(EARLY),
            causal=call.visible.causal,
            row_total=rows.get("row_total"),
            of_mask=call.visible.of_mask,
        )


def _tile(tensor: Tensor | None, shape: tuple[int, ...], instead: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A strip of a mask or bias, with strides for the full shape. Where there is none, `instead` fills the argument,
    which the kernel does not read."""
    if tensor is None:
        return instead, (0, 0, 0, 0)
    tensor = tensor.expand(shape)
    return (tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor), tensor.stride()


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with contiguous channels; its other axes may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

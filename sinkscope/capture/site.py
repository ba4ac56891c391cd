"""Site: one attention call of a model's forward pass, its place in the model, and what its queries may see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionKind:
    """What a query of an attention call may see: `full`, `cross`, or the last `size` keys: `sliding`, `chunked`.

    As text, in the tables: `full`, `cross`, `sliding:512`, `chunked:8192`.
    """

    name: str
    size: int | None = None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}:{self.size}"


@dataclass(frozen=True)
class Site:
    """One attention call of a model's forward pass, and its place in the model.

    Attributes:
        stream: `text`, `vision`, `audio`, `encoder`, `decoder` or `cross`.
        layer: the block's index in its ModuleList; a running number in the stream where there is no such list, or
            where two calls would have the same number.
        module: dotted path of the attention module.
        call: 0 for the module's first call in a pass, 1 for its second, and so on.
        kind: `full`, `sliding:W`, `chunked:C` or `cross`.
        head_dim, value_dim: widths of q and k, and of v; None where these were not seen.
        path: how the call is read: `interface` (through transformers' attention interface) or `inline` (computed by the
            model's own code).
        score: how logits become attention: `softmax`, or a name in `scores.SCORES`.
        kernel: what sums the attention: `triton` or `torch blocks`; None where the model's own map is summed.
        block, projection: paths of the block and of the output projection; None where there is none.
    """

    stream: str
    layer: int
    module: str
    call: int
    kind: AttentionKind
    heads: int
    kv_groups: int
    head_dim: int | None
    value_dim: int | None
    causal: bool
    block: str | None
    projection: str | None
    path: str = "interface"
    score: str = "softmax"
    kernel: str | None = None

    @property
    def name(self) -> str:
        return self.module if self.call == 0 else f"{self.module}[{self.call}]"

    @property
    def cross(self) -> bool:
        """Whether queries attend to another sequence, which may be as long as their own."""
        return self.kind.name == "cross"

"""Attention that a model computes in its own forward: read where its softmax meets the values, by watching torch.

While a forward runs, every torch function call passes through `InlineWatch`. A softmax over the last axis whose result
is then the left factor of a matrix product is attention; a router's or an output softmax never is. Calls of
`scaled_dot_product_attention` are read as they stand. The model's own computation is not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from sinkscope.capture.inline.calls import InlineCall, SdpaCall, map_of, sdpa_call
from sinkscope.capture.inline.products import Product, read_product
from sinkscope.capture.private_doors import open_multi_head_attention, weak_tensor_table

SAME_VALUES = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze", "__getitem__"),
        *("narrow", "to", "type_as", "type", "float", "half", "bfloat16", "double", "contiguous", "clone", "dropout"),
    }
)
"""Functions that leave probabilities what they were, if perhaps in another shape or dtype (dropout: in eval mode)."""

TURNED = frozenset(
    {
        *("transpose", "permute", "swapaxes", "swapdims", "t", "adjoint", "movedim", "moveaxis", "__get__"),
        *("topk", "argmax", "max", "amax", "sum", "mean"),
    }
)
"""After these the axes are no longer (query, key): a product with the result says nothing of values."""

FUNCTIONS = ("softmax", "dropout")


InlineHandler = Callable[[InlineCall | SdpaCall], None]


@dataclass(eq=False)
class _Softmax:
    """Where a tracked tensor comes from.

    Attributes:
        products: the matrix products its logits were made of.
        plain: it still has that softmax's values. straight: its last axes are still (query, key).
        met: filled once values were multiplied with it, or with another tensor of the same softmax.
    """

    module: str
    logits: Tensor
    products: frozenset[Product]
    plain: bool = True
    straight: bool = True
    met: list[bool] = field(default_factory=list)


class InlineWatch(TorchFunctionMode):
    """Calls `handler` with every attention a model computes inline; to be entered around its forward.

    `watched(model)` keeps the stack of modules whose forward is under way. Tensors are tracked by weak references: a
    layer's map lives as long as the model's own code keeps it. `split`: modules that multiply maps with each other
    (low-rank approximations), whose attention is no single map. `unmet`: how many softmaxes of products a module
    took whose values they could not be seen to meet.
    """

    def __init__(self, handler: InlineHandler) -> None:
        super().__init__()
        self.handler = handler
        self.modules: list[str] = [""]
        self.resting = 0
        self.in_multi_head = 0
        self.split: set[str] = set()
        self.unmet: Counter[str] = Counter()
        self.tracked = weak_tensor_table()

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Hooks on the model's modules and this mode, until the block ends."""
        handles = []
        try:
            for name, module in model.named_modules():
                if not _is_function(name, module):
                    handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                    handles.append(module.register_forward_hook(self._leaving))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self.modules[:] = [""]
            self.tracked = weak_tensor_table()

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Our own computations inside a forward are none of the model's."""
        self.resting += 1
        try:
            yield
        finally:
            self.resting -= 1

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.modules.append(name)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self.modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        result = func(*args, **kwargs)
        if not self.resting and isinstance(result, Tensor) and result.dim() > 2:
            self._note(getattr(func, "__name__", ""), args, kwargs, result)
        return result

    def _multi_head(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """nn.MultiheadAttention's function, watched inside: this mode is off while a function it was asked for runs."""
        multi_head = open_multi_head_attention()
        self.in_multi_head += 1
        try:
            with self:
                return multi_head(*args, **kwargs)
        finally:
            self.in_multi_head -= 1

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        if name == "scaled_dot_product_attention":
            call = sdpa_call(self.modules[-1], result, *args, **kwargs)
            call.handed_on = bool(self.in_multi_head)
            self.handler(call)
            return
        origins = [self.tracked[tensor] for tensor in _tensors(args, kwargs) if tensor in self.tracked]
        softmaxes = [origin for origin in origins if isinstance(origin, _Softmax)]
        products = frozenset(product for origin in origins if isinstance(origin, frozenset) for product in origin)
        if name == "softmax":
            self._softmax(args, kwargs, products, result)
            return
        product = read_product(name, args, kwargs, result)
        if product is not None and softmaxes:
            self._multiplied(product, result)
        elif product is not None:
            self.tracked[result] = frozenset([product])
        elif softmaxes:
            self.tracked[result] = _derived(softmaxes, name)
        elif products:
            self.tracked[result] = products

    def _softmax(self, args: Any, kwargs: dict[str, Any], products: frozenset[Product], result: Tensor) -> None:
        logits = args[0] if args else kwargs["input"]
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if axis in (-1, result.dim() - 1) and result.dim() in (3, 4):
            self.tracked[result] = _Softmax(self.modules[-1], logits, products)
        if products:
            self.unmet[self.modules[-1]] += 1

    def _multiplied(self, product: Product, result: Tensor) -> None:
        """A product with a tracked map: with values on its right it is attention, with another map it is none."""
        left, right = (self.tracked.get(factor) for factor in product.factors)
        if not isinstance(left, _Softmax) or isinstance(right, _Softmax):
            softmaxes = [origin for origin in (left, right) if isinstance(origin, _Softmax)]
            self.split.update(origin.module for origin in softmaxes)
            self.tracked[result] = replace(softmaxes[0], straight=False)
        elif left.straight and not left.met:
            seen = map_of(left.logits, product, left.products, left.plain)
            if seen is not None:
                left.met.append(True)
                self.unmet[left.module] -= bool(left.products)
                if self.in_multi_head and seen.query is not None:
                    seen.query = seen.query * seen.query.shape[-1] ** 0.5  # torch scales q before the product
                self.handler(InlineCall(left.module, seen, bool(self.in_multi_head)))


def _derived(softmaxes: list[_Softmax], name: str) -> _Softmax:
    first = softmaxes[0]
    same = all(other.met is first.met for other in softmaxes)
    return replace(
        first,
        plain=first.plain and same and name in SAME_VALUES,
        straight=first.straight and same and name not in TURNED,
    )


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))


def _is_function(name: str, module: nn.Module) -> bool:
    """Modules that stand for a function (Softmax, Dropout, IntSoftmax): attention belongs to what holds them."""
    return name == "" or any(word in f"{name.rpartition('.')[2]} {type(module).__name__}".lower() for word in FUNCTIONS)

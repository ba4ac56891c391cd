"""Finds attention that a model computes in its own forward pass, by watching its torch calls.

During a forward pass every torch function call passes through `InlineWatch`. A softmax over the last axis is taken for
attention where its result is the left factor of a matrix product; the softmax of a router or of the model's output
never is. Calls of `scaled_dot_product_attention` are read directly. The model's own computation is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from sinkscope.capture.hooks import hooked
from sinkscope.capture.inline.calls import InlineCall, Product, SdpaCall, flex_call, map_of, read_product, sdpa_call
from sinkscope.capture.inline.groups import is_grouped_call
from sinkscope.capture.inline.heads import HeadsTogether
from sinkscope.capture.private_doors import open_multi_head_attention, weak_tensor_table

SAME_VALUES = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze", "__getitem__"),
        *("narrow", "to", "type_as", "type", "float", "half", "bfloat16", "double", "contiguous", "clone", "dropout"),
    }
)
"""Functions that change at most the shape or dtype of probabilities, not their values (dropout: in eval mode)."""

TURNED = frozenset(
    {
        *("transpose", "permute", "swapaxes", "swapdims", "t", "adjoint", "movedim", "moveaxis", "__get__"),
        *("topk", "argmax", "max", "amax", "sum", "mean"),
    }
)
"""After these functions the last axes are no longer (query, key), so a product with the result is not taken for
attention."""

FUNCTIONS = ("softmax", "dropout")


InlineHandler = Callable[[InlineCall | SdpaCall], None]


@dataclass(eq=False)
class _Softmax:
    """The softmax that a tracked tensor comes from.

    Attributes:
        products: the matrix products that formed the softmax's logits.
        straight: the tensor's last axes are still (query, key).
        matched: filled once a tensor of this softmax was multiplied with values; all its tensors share this list.
        kept: the probabilities before dropout, in a pass that trains; None where nothing was dropped.
        mixed: the tensor is what the softmax made of values, where no product was seen to form its logits.
    """

    module: str
    logits: Tensor
    products: frozenset[Product]
    straight: bool = True
    matched: list[bool] = field(default_factory=list)
    kept: Tensor | None = None
    mixed: bool = False


class InlineWatch(TorchFunctionMode):
    """Calls `handler` with every attention that a model computes inline while `watched(model)` is entered.

    `modules` is the stack of modules whose forward is running. Tensors are tracked by weak references, so a layer's map
    lives only as long as the model's own code keeps it. `split` holds modules that multiply maps with each other
    (low-rank approximations), whose attention is no single map. `unmatched` counts, for each module, the softmaxes over
    products that were not seen to be multiplied with values, and calls of torch's function with more than four axes.
    `failed` gets what fails here in the place of the model.
    """

    def __init__(
        self, handler: InlineHandler, model: nn.Module, failed: Callable[[Exception], None] | None = None
    ) -> None:
        super().__init__()
        self.handler, self._failed = handler, failed
        self.modules: list[str] = [""]
        self._given: list[Tensor | None] = [None]
        self._heads = HeadsTogether(model)
        self.pauses = 0
        self.in_multi_head = 0
        self.split: set[str] = set()
        self.unmatched: Counter[str] = Counter()
        self.tracked = weak_tensor_table()

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Adds hooks to the model's modules and enters this mode; undoes both when the block ends."""
        try:
            with ExitStack() as stack:
                for name, module in model.named_modules():
                    if not is_function(name, module):
                        enter = self._entering(name)
                        stack.enter_context(hooked(module, enter, self._leaving, first=True, with_kwargs=True))
                stack.enter_context(self)
                yield
        finally:
            self.reset()
            self.tracked = weak_tensor_table()

    def entered(self, name: str, given: Any) -> None:
        """The forward of the module at `name` begins, with `given` as its first input."""
        self.modules.append(name)
        self._given.append(given if isinstance(given, Tensor) else None)

    def left(self) -> None:
        """The forward of the innermost module ends."""
        self.modules.pop()
        self._given.pop()

    def flush(self) -> None:
        """Hands over the calls of heads that other heads did not follow on: the pass has ended."""
        for call in self._heads.rest():
            self.handler(call)

    def reset(self) -> None:
        """Forgets what runs, and the calls that are held."""
        self.modules[:], self._given[:] = [""], [None]
        self._heads.rest()

    def _hand(self, call: InlineCall | SdpaCall) -> None:
        for whole in self._heads.take(call, self._given[-1]):
            self.handler(whole)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores torch calls until the block ends: for our own computations inside the model's forward pass."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.entered(name, kwargs.get("hidden_states", args[0] if args else None))

        return enter

    def _leaving(self, module: nn.Module, args: Any, *output: Any) -> None:
        self.left()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        result = func(*args, **kwargs)
        if not self.pauses:
            try:
                self._look(getattr(func, "__name__", ""), args, kwargs, result)
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)
        return result

    def _look(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if name == "flex_attention":
            self._hand(flex_call(self.modules[-1], result[0], *args))
        elif isinstance(result, Tensor) and result.dim() > 2:
            self._note(name, args, kwargs, result)

    def _multi_head(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs nn.MultiheadAttention's function with this mode entered again, since torch disables a mode in its own
        handler."""
        multi_head = open_multi_head_attention()
        self.in_multi_head += 1
        try:
            with self:
                return multi_head(*args, **kwargs)
        finally:
            self.in_multi_head -= 1

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        if name == "scaled_dot_product_attention":
            if result.dim() > 4 and not is_grouped_call(*args, **kwargs):  # windows are an axis of their own
                self.unmatched[self.modules[-1]] += 1
                return
            call = sdpa_call(self.modules[-1], result, *args, **kwargs)
            call.feeds_projection = bool(self.in_multi_head)
            self._hand(call)
            return
        tracked = self.tracked  # most often empty, and a lookup by weak reference is slow
        origins = [tracked[tensor] for tensor in _tensors(args, kwargs) if tensor in tracked] if tracked else []
        softmaxes = [origin for origin in origins if isinstance(origin, _Softmax)]
        products = frozenset(product for origin in origins if isinstance(origin, frozenset) for product in origin)
        if name == "softmax":
            self._softmax(args, kwargs, products, result)
            return
        product = read_product(name, args, kwargs, result, bool(softmaxes))
        if product is not None and softmaxes:
            self._multiplied(product, result)
        elif product is not None:
            self.tracked[result] = frozenset([product])
        elif softmaxes and not _still_holds(softmaxes[0], name, result):
            pass  # a gate's softmax (experts, a router of heads) or a mean of values has reached the residual stream
        elif softmaxes and (name in SAME_VALUES | TURNED or not softmaxes[0].mixed):
            self.tracked[result] = _derived(softmaxes, name)
            if name == "dropout" and _drops(args, kwargs):
                self.tracked[result] = _before_dropout(self.tracked[result], args, kwargs)
        elif products:
            self.tracked[result] = products

    def _softmax(self, args: Any, kwargs: dict[str, Any], products: frozenset[Product], result: Tensor) -> None:
        logits = args[0] if args else kwargs["input"]
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if axis in (-1, result.dim() - 1) and result.dim() in (3, 4, 5):
            self.tracked[result] = _Softmax(self.modules[-1], logits, products)
        if products:
            self.unmatched[self.modules[-1]] += 1

    def _multiplied(self, product: Product, result: Tensor) -> None:
        """Handles a product with a tracked map: map @ values is attention, a product of two maps is not.

        Nor is one with the mean of values by a softmax of k alone, by which linear attention multiplies q.
        """
        left, right = (self.tracked.get(factor) for factor in product.factors)
        if not isinstance(left, _Softmax) or isinstance(right, _Softmax) or left.mixed:
            softmaxes = [origin for origin in (left, right) if isinstance(origin, _Softmax)]
            self.split.update(origin.module for origin in softmaxes)
            self.tracked[result] = replace(softmaxes[0], straight=False)
        elif left.straight and not left.matched and not _of_channels(left, product, right):
            dropped = left.kept is not None
            if left.kept is not None:
                product = replace(product, left=left.kept.view_as(product.left))
            seen = map_of(left.logits, product, left.products)
            if seen is not None:
                left.matched.append(True)
                if not left.products:
                    self.tracked[result] = replace(left, straight=False, mixed=True)
                self.unmatched[left.module] -= bool(left.products)
                if self.in_multi_head and seen.query is not None:
                    seen.query = seen.query * seen.query.shape[-1] ** 0.5  # undoes torch's scaling of q
                self._hand(InlineCall(left.module, seen, bool(self.in_multi_head), dropped))


def _still_holds(softmax: _Softmax, name: str, result: Tensor) -> bool:
    """Whether what a function makes of a softmax still may be its map: it has its axes of queries and keys, and, where
    no product formed it, no layer has read it."""
    if name in SAME_VALUES | TURNED:
        return True
    left = [*result.shape]
    for size in softmax.logits.shape[-2:]:
        if size not in left:
            return False
        left.remove(size)
    return name != "linear" or bool(softmax.products)


def _of_channels(softmax: _Softmax, product: Product, right: object) -> bool:
    """Whether a softmax that no product formed is one over channels, as in linear attention: q or k itself.

    A product stands to its right, or it has other numbers of rows and columns.
    """
    rows, columns = product.left.shape[-2:]
    return not softmax.products and (right is not None or rows != columns)


def _derived(softmaxes: list[_Softmax], name: str) -> _Softmax:
    first = softmaxes[0]
    same = all(softmax.matched is first.matched for softmax in softmaxes)
    return replace(
        first,
        straight=first.straight and same and name not in TURNED,
    )


def _drops(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of a dropout function sets anything to 0."""
    arguments = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return bool(arguments.get("training", arguments.get("train", True))) and arguments.get("p", 0.5) > 0


def _before_dropout(after: _Softmax, args: Any, kwargs: dict[str, Any]) -> _Softmax:
    """What is known of a map after dropout: its probabilities are those before. In place, they are lost."""
    if kwargs.get("inplace", len(args) > 3 and args[3]):
        return replace(after, straight=False)
    return replace(after, kept=(args[0] if args else kwargs["input"]).detach())


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (element for element in value if isinstance(element, Tensor))


def is_function(name: str, module: nn.Module) -> bool:
    """Whether a module is the model itself, or only stands for a function (Softmax, Dropout, IntSoftmax): attention in
    it belongs to the module that holds it."""
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return name == "" or (any(word in words for word in FUNCTIONS) and next(module.parameters(), None) is None)

"""LayerView: what the metrics can read of one attention call. Everything in it is O(T), and it holds no padding."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.private_doors import before_operations, written_by
from sinkscope.capture.sites import Site
from sinkscope.capture.token_sums import QuerySums, TokenSums, query_sums, token_sums
from sinkscope.errors import SinkscopeError


class Missing(Exception):
    """Raised where a metric needs a tensor that this layer does not have; the metric's column stays NaN."""


@dataclass
class LayerView:
    """One attention call on one batch, whose sequences all have length T. Tensors have the model's dtype.

    Shapes: query (B, H, T, d), key (B, G, T, d), value (B, G, T, dv), output o and projected w (B, T, H, dv), of which
    w alone has what learned keys add; residual_in x, attention_input z, residual_out e (B, T, D); raw_written, what the
    output projection returns less its bias, summed over all heads (B, T, D), kept where a measurement asks for it. Each
    may be None: use the properties, or `need`, which raise Missing. `raw_factors` gives `factors`, which are computed
    where a column reads them. `head_mean` turns the mean over this process's heads into that over all `layer_heads` of
    the layer; None where it holds them all. `readings`: what readers made of the call. `sampled`: number of its first
    sequences that columns too slow for every sequence are measured on.
    """

    site: Site
    epsilon: float
    attention: AttentionSums
    output: Tensor | None
    raw_query: Tensor | None = None
    raw_key: Tensor | None = None
    raw_value: Tensor | None = None
    raw_projected: Tensor | None = None
    raw_written: Tensor | None = None
    raw_factors: Callable[[], Tensor | None] | None = None
    residual_in: Tensor | None = None
    attention_input: Tensor | None = None
    residual_out: Tensor | None = None
    head_mean: Callable[[Site, Tensor], Tensor] | None = None
    readings: Mapping[str, Any] = field(default_factory=dict)
    layer_heads: int = 0
    sampled: int = 0
    _kept: dict[Callable[[LayerView], Tensor], Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.attention.first.shape[0]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.attention.first.shape[1]

    @property
    def queries(self) -> int:
        """Tq, the number of queries."""
        return self.attention.first.shape[-1]

    @property
    def keys(self) -> int:
        """Tk, the number of keys."""
        return self.attention.columns.shape[-1]

    @cached_property
    def query(self) -> Float[Tensor, "batch head query dim"]:
        """q_i of each head, as the attention call gets it."""
        return need(self.raw_query)

    @cached_property
    def key(self) -> Float[Tensor, "batch group key dim"]:
        """k_j of each group of heads, as the attention call gets it."""
        return need(self.raw_key)

    @cached_property
    def value(self) -> Float[Tensor, "batch group key vdim"]:
        """v_j of each group of heads."""
        return need(self.raw_value)

    @cached_property
    def projected(self) -> Float[Tensor, "batch query head vdim"]:
        """w: what the output projection reads from each head."""
        return need(self.raw_projected)

    @cached_property
    def query_sums(self) -> QuerySums:
        """What is read of the queries; of pairs with keys too where the attention is causal."""
        causal = self.attention.causal and self.raw_key is not None
        return query_sums(self.query, self.key if causal else None)

    @cached_property
    def key_norms(self) -> Float[Tensor, "batch group key"]:
        """norm k_j, for each group of heads."""
        return torch.linalg.vector_norm(self.key, dim=-1)

    @cached_property
    def value_norms(self) -> Float[Tensor, "batch head key"]:
        """norm v_j, repeated for each query head of the group."""
        return self.per_query_head(torch.linalg.vector_norm(self.value, dim=-1))

    @cached_property
    def output_norms(self) -> Float[Tensor, "batch head query"]:
        """norm o_i."""
        if self.plain:
            return self.projected_norms
        return torch.linalg.vector_norm(need(self.output), dim=-1).transpose(1, 2)

    @cached_property
    def projected_norms(self) -> Float[Tensor, "batch head query"]:
        """norm w_i."""
        return torch.linalg.vector_norm(self.projected, dim=-1).transpose(1, 2)

    @cached_property
    def written(self) -> Float[Tensor, "batch head query rank"]:
        """R_h w_i: what W_O^h w_i is, in coordinates of the head's own."""
        return self._through_output()

    @cached_property
    def written_values(self) -> Float[Tensor, "batch head key rank"]:
        """R_h v_j, in the same coordinates."""
        return self._values_through_output().flatten(1, 2)

    @cached_property
    def written_norms(self) -> Float[Tensor, "batch head query"]:
        """norm W_O^h w_i."""
        return torch.linalg.vector_norm(self.written if self.writes else self._through_output(), dim=-1)

    @cached_property
    def written_value_norms(self) -> Float[Tensor, "batch head key"]:
        """norm W_O^h v_j."""
        if self.writes:
            return torch.linalg.vector_norm(self.written_values, dim=-1)
        return torch.linalg.vector_norm(self._values_through_output(), dim=-1).flatten(1, 2)

    @cached_property
    def factors(self) -> Float[Tensor, "head rank dim"] | None:
        """R_h with norm(R_h w) = norm(W_O^h w) for every w; None where the output projection is not known."""
        return None if self.raw_factors is None else self.raw_factors()

    @property
    def writes(self) -> bool:
        """Whether a measurement reads what heads write again, so that `written` and `written_values` are worth their
        memory."""
        return self.raw_written is not None

    def _through_output(self) -> Float[Tensor, "batch head query rank"]:
        return torch.einsum("bthd,hrd->bhtr", self.projected, need(self.factors).to(self.projected.dtype))

    def _values_through_output(self) -> Float[Tensor, "batch group repeat key rank"]:
        grouped = need(self.factors).to(self.value.dtype).unflatten(0, (self.value.shape[1], -1))
        return torch.einsum("bgtd,gxrd->bgxtr", self.value, grouped)

    @cached_property
    def x(self) -> Float[Tensor, "batch token channel"]:
        """The residual stream entering the block."""
        return need(self.residual_in)

    @cached_property
    def x_sums(self) -> TokenSums:
        """What is read of every x_i."""
        return token_sums(self.x, whole=True)

    @property
    def x_norms(self) -> Float[Tensor, "batch token"]:
        """norm x_i."""
        return self.x_sums.norms

    @property
    def x_peaks(self) -> Float[Tensor, "batch token"]:
        """Largest abs element of each x_i."""
        return self.x_sums.peaks

    @cached_property
    def z(self) -> Float[Tensor, "batch token channel"]:
        """What the q/k/v projections read."""
        return need(self.attention_input)

    @cached_property
    def z_sums(self) -> TokenSums:
        """What is read of every z_i."""
        return token_sums(self.z)

    @property
    def z_norms(self) -> Float[Tensor, "batch token"]:
        """norm z_i."""
        return self.z_sums.norms

    def rows(self, count: int) -> LayerView:
        """A view of the first `count` sequences, 1 to `batch`; where it has fewer, without `readings`."""
        if count == self.batch:
            return self

        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        cut: dict[str, Any] = {name: value[:count] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, attention=self.attention.rows(count), readings={}, **cut)

    @cached_property
    def plain(self) -> bool:
        """Whether the output projection reads the attention's output as it is: no gate or norm lies between."""
        output, read = self.output, self.raw_projected
        if output is None or read is None or (output.shape, output.dtype) != (read.shape, read.dtype):
            return False
        return _same_memory(output, read) or torch.equal(output, read)

    def layer_mean(self, values: Float[Tensor, "batch head"]) -> Float[Tensor, "batch 1"]:
        """Mean over all heads of the layer, including those that other processes hold."""
        return self.over_heads(values.mean(-1, keepdim=True))

    def over_heads(self, mean: Tensor) -> Tensor:
        """The mean over all heads of the layer, from that over this process's heads; every process must call it."""
        return mean if self.head_mean is None else self.head_mean(self.site, mean)

    def per_query_head(self, grouped: Tensor) -> Tensor:
        """(B, G, ...) -> (B, H, ...): repeats each group's values for each of its query heads."""
        return grouped.repeat_interleave(self.heads // grouped.shape[1], dim=1)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape show the same numbers of memory. The step along an axis of size 1, as that
    of a single sequence, tells nothing."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.data_ptr() == other.data_ptr() and all(size == 1 or a == b for size, a, b in steps)


def once_per_view(compute: Callable[[LayerView], Tensor]) -> Callable[[LayerView], Tensor]:
    """Decorates a function that several metrics call: it runs once for each view, and the view caches the result."""

    @wraps(compute)
    def kept(view: LayerView) -> Tensor:
        if compute not in view._kept:
            view._kept[compute] = compute(view)
        return view._kept[compute]

    return kept


def once_per_mask(compute: Callable[[LayerView], Tensor]) -> Callable[[LayerView], Tensor]:
    """Decorates a function that asks only which queries may see which keys: it runs once for all layers of a batch that
    share a mask. Each layer gets a copy, as a run keeps the values of each; Missing is raised anew for each."""

    @wraps(compute)
    def shared(view: LayerView) -> Tensor:
        found, place = view.attention.of_mask, (compute, view.batch, view.heads)
        if place not in found:
            try:
                found[place] = compute(view)
            except Missing:
                found[place] = None
        result = found[place]
        if result is None:
            raise Missing
        return result.clone()

    return shared


def need(tensor: Tensor | None) -> Tensor:
    """The tensor in float32 (float64 stays). Raises Missing where it is None."""
    if tensor is None:
        raise Missing
    return tensor if tensor.dtype == torch.float64 else tensor.float()


# A LayerView for the code of others: it reads as ours does, and what it does to it stays with it.
#
# The tensors share memory with those that the model and sinkscope's own columns read, so that nothing is copied. A
# torch operation that would write into that memory is refused before it runs, and numpy gets copies.


SEALED = (LayerView, AttentionSums, QuerySums, TokenSums)
"""Classes whose attributes cannot be set anew in what others see."""

HANDING_OVER = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage)
"""Methods that hand a tensor's memory to code whose writes torch does not see."""


@contextmanager
def sealed(view: LayerView) -> Iterator[LayerView]:
    """A view that reads as `view`, until the block ends. What is computed through it is kept in it alone.

    Within the block SinkscopeError is raised where an attribute of it is set anew, and where a torch operation would
    write into its tensors, in this thread.
    """
    memory = _Memory()
    shown = memory.seal(view)
    with before_operations(memory.refuse_writes), _Copying(memory):
        yield shown


class _Memory:
    """The stretches of memory that the tensors of a view lie in."""

    def __init__(self) -> None:
        self._stretches: dict[int, int] = {}
        self._begins: list[int] = []
        self._asking = False

    def seal(self, value: Any) -> Any:
        """A copy of `value` whose tensors are other objects over the same memory."""
        if isinstance(value, Tensor):
            self._note(value)
            return value.detach()
        if isinstance(value, SEALED):
            kind: Any = type(value)
            copy: Any = object.__new__(_sealed_class(kind))
            vars(copy).update({name: self.seal(attribute) for name, attribute in vars(value).items()})
            return copy
        if type(value) in (list, tuple):
            return type(value)(self.seal(item) for item in value)
        return {key: self.seal(item) for key, item in value.items()} if isinstance(value, dict) else value

    def _note(self, tensor: Tensor) -> None:
        begin, size = self._place(tensor)
        self._stretches[begin] = max(self._stretches.get(begin, 0), size)
        self._begins = sorted(self._stretches)

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor lies in memory of the view."""
        if self._asking or not isinstance(tensor, Tensor):
            return False
        begin, size = self._place(tensor)
        before = bisect_right(self._begins, begin + size - 1) - 1 if size else -1
        return before >= 0 and begin < self._begins[before] + self._stretches[self._begins[before]]

    def refuse_writes(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises SinkscopeError for an operation that would write into memory of the view."""
        if any(self.holds(tensor) for tensor in written_by(operator, args, kwargs)):
            raise SinkscopeError("it writes into what it was shown; work on a copy: .clone()")

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Where the memory of a tensor begins, and its bytes; (0, 0) for one without memory, such as one on meta."""
        self._asking = True  # `_Copying` sees this question too
        try:
            storage = tensor.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # NotImplementedError is one
            return 0, 0
        finally:
            self._asking = False


class _Copying(TorchFunctionMode):
    """Gives numpy, and other code outside torch, a copy of the view's memory."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HANDING_OVER and self._memory.holds(args[0]):
            args = (args[0].clone(), *args[1:])
        return func(*args, **(kwargs or {}))


@functools.cache
def _sealed_class(kind: Any) -> type:
    """A class whose attributes are set once."""

    def refuse(self: object, name: str, value: object) -> None:
        if name in vars(self) or isinstance(getattr(kind, name, None), functools.cached_property):
            _refused(name)
        object.__setattr__(self, name, value)

    def keep(self: object, name: str) -> NoReturn:
        _refused(name)

    return type(kind.__name__, (kind,), {"__setattr__": refuse, "__delattr__": keep, "__module__": kind.__module__})


def _refused(name: str) -> NoReturn:
    raise SinkscopeError(f"it sets `{name}` of what it was shown, which is there to be read")

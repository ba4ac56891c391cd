"""The output projection: which module reads the heads, and how each head's slice of it changes a norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sinkscope.capture.alone import measuring
from sinkscope.capture.hooks import first_returned, forwards_only, unheard
from sinkscope.capture.precision import has_float64
from sinkscope.capture.private_doors import (
    conv1d,
    execution_devices,
    is_bitnet,
    linear_kinds,
    round_weight_alone,
    rounding_package,
)
from sinkscope.capture.quiet_logs import quiet_logs

NAMES = (
    "o_proj",
    "out_proj",
    "proj",
    "o",
    "projection",
    "projection_layer",
    "dense",
    "linear_out",
    "c_proj",
    "Wo",
    "wo",
    "out_lin",
    "to_out",
    "out",
    "attention_out",
    "post_proj",
    "output_projection",
)


def output_projection(model: nn.Module, path: str, width: int) -> str | None:
    """Path of the linear layer that reads `width` (heads * head width) channels from the attention module at `path`.

    Searches the module's children first, then the siblings `output.dense` (BERT and related models) and, of a module
    `self`, `output` (BigBird-Pegasus). A module without parameters only multiplies what another one projects
    (x-transformers' `Attend`): then every sibling that may be a projection is searched, unless it is the model's own
    layer. None where none of them has one.
    """
    owner, _, own = path.rpartition(".")
    siblings: tuple[str, ...] = ("output.dense", "output") if own == "self" else ("output.dense",)
    attending = _submodule(model, path)
    if owner and attending is not None and next(attending.parameters(), None) is None:
        siblings += NAMES
    for base, names in ((path, NAMES), (owner, siblings)):
        for name in names:
            place = f"{base}.{name}".removeprefix(".")
            module = _submodule(model, place)
            inside = None if module is None else _reader(module, width)
            if inside is not None:
                return f"{place}.{inside}".removesuffix(".")
    return None


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:  # there is none, or XLNet's matrix without a layer
        return None


def _reader(module: nn.Module, width: int) -> str | None:
    """The path inside `module` of the layer that reads `width` channels, empty where it is the module itself; None
    where there is none.

    Of a Sequential, its first layer is taken where the others do nothing. Of another module, a child is taken that has
    the name of a projection (a gate may stand before it), unless the module holds numbers of its own, with which it
    may change what the child returns.
    """
    if _reads(module, width):
        return ""
    if isinstance(module, nn.Sequential):
        alone = len(module) and all(_does_nothing(after) for after in [*module][1:])
        return "0" if alone and _reads(module[0], width) else None
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        return None
    inside = (name for name in (*NAMES, "linear") if isinstance(getattr(module, name, None), nn.Module))
    return next((name for name in inside if _reads(getattr(module, name), width)), None)


def _does_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout | nn.Identity)  # in eval mode


def _reads(module: nn.Module, width: int) -> bool:
    for name in ("in_features", "infeatures", "nx"):
        if hasattr(module, name):
            return bool(getattr(module, name) == width)
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and width in weight.shape


def head_factors(projection: nn.Module, heads: int, head_dim: int) -> Float[Tensor, "head rank dim"]:
    """`factors_of` the projection's weight. The bias belongs to no head and is left out."""
    return factors_of(projection_weight(projection, heads * head_dim), heads, head_dim)


def factors_of(weight: Float[Tensor, "out width"], heads: int, head_dim: int) -> Float[Tensor, "head rank dim"]:
    """R_h with norm(R_h w) = norm(W_O^h w) for every w, from the QR factorisation of each head's slice of W_O.

    The d x d factor costs as much as the Gram matrix and stays accurate near W_O's null space, where the Gram matrix
    loses half the digits. Float32 (float64 for a float64 weight), on the weight's device.
    """
    exact = weight if weight.dtype == torch.float64 else weight.float()
    slices = exact.unflatten(1, (heads, head_dim)).transpose(0, 1)
    device = slices.device
    if device.type != "cpu" and exact.dtype == torch.float32 and has_float64(device):
        return _by_cholesky(slices)
    return torch.linalg.qr(slices if has_float64(device) else slices.cpu(), mode="r").R.to(device)


def _by_cholesky(slices: Float[Tensor, "head out dim"]) -> Float[Tensor, "head rank dim"]:
    """The factors of float32 slices on an accelerator, which computes a QR factorisation column by column: on an H200
    26 ms for 32 heads of 4,096 x 128, where this takes 0.3. Half the digits of a float64 are all that a float32 has.

    A slice without full rank may have no Cholesky factor; then all are factorised by QR.
    """
    exact = slices.double()
    lower, failed = torch.linalg.cholesky_ex(exact.mT @ exact)
    return torch.linalg.qr(slices, mode="r").R if bool(failed.any()) else lower.mT.float()


def projection_weight(projection: nn.Module, width: int) -> Float[Tensor, "out width"]:
    """The projection's weight W, (out, width). Under --tp these are the columns of this process's heads.

    A plain matrix is read from the weight of a layer that only multiplies by it, and so is one whose tensor knows its
    numbers (`dequantize` of torchao and optimum-quanto). Any other layer is applied to the identity: its weight is
    packed or quantised (8-bit floats have their scales apart), or is only a part of what it does, as beside an adapter.
    """
    projection = _asked(projection)
    with align_module_device(projection):  # loads a weight that accelerate keeps on disk or on another device
        weight = local_part(getattr(projection, "weight", None))
        if isinstance(weight, Tensor) and weight.dim() == 2 and _plain(weight) and not weight.is_meta:
            forward = None if rounding_package(projection) else type(projection).forward
            if forward is nn.Linear.forward:
                return weight.detach()
            if forward is conv1d().forward:
                return weight.detach().mT
        if (known := _dequantized(projection, weight, width)) is not None:
            return known
    projection = _asked(projection, applied=True)
    with torch.no_grad(), quiet_logs(), _unrounded(projection):  # not in each pass: a level empties loggers' caches
        eye = torch.eye(width, **_home(projection, width))
        nothing = _applied(projection, torch.zeros_like(eye))
        if nothing.isfinite().all():
            return (_applied(projection, eye) - nothing).mT
        return (_applied(projection, eye) - _applied(projection, -eye)).mT / 2


def _dequantized(projection: nn.Module, weight: Any, width: int) -> Tensor | None:
    """The numbers of a quantised weight whose tensor knows them, in a layer that only multiplies by it: what this
    layer reads may be cut to a range that a calibration set, in which an identity does not lie. None for another."""
    multiplies = type(projection).forward is nn.Linear.forward or hasattr(projection, "weight_qtype")
    if not multiplies or not isinstance(weight, Tensor) or type(weight).dequantize is Tensor.dequantize:
        return None
    with torch.no_grad(), suppress(RuntimeError, NotImplementedError, AttributeError):
        numbers = weight.dequantize()
        if type(numbers) is Tensor and numbers.is_floating_point() and numbers.shape[1:] == (width,):
            return numbers
    return None


def projection_bias(projection: nn.Module, width: int) -> Float[Tensor, " out"]:
    """What the projection returns for 0: its bias, whatever kind of layer it is.

    A quantised layer may divide what it reads by its size, and so return no number for 0: then the mean of what it
    returns for a vector and its opposite.
    """
    projection = _asked(projection, applied=True)
    with torch.no_grad(), quiet_logs(), _unrounded(projection):
        home = _home(projection, width)
        nothing = _applied(projection, torch.zeros(1, width, **home))[0]
        if nothing.isfinite().all():
            return nothing
        ones = torch.ones(1, width, **home)
        return (_applied(projection, ones) + _applied(projection, -ones))[0] / 2


def holds_codes(projection: nn.Module) -> bool:
    """Whether a layer or one inside it is quantised: it holds codes beside numbers, or tensors of a kind of its own, or
    a plain weight, but rounds what it reads: BitNet's, or one whose codes compressed-tensors turned into numbers."""
    plain = all(_plain(local_part(held)) for held in (*projection.parameters(), *projection.buffers()))
    return not plain or _packed(projection) or any(map(_rounds_input, projection.modules()))


def _rounds_input(layer: nn.Module) -> bool:
    """Whether a layer with a plain weight may round what it reads."""
    return rounding_package(layer) is not None or is_bitnet(layer)


def _packed(module: nn.Module) -> bool:
    """Whether the layer is one of torch's own quantised ones (`quantize_dynamic`), whose codes are no tensor."""
    return type(module).__module__.startswith("torch.ao.nn.quantized")


def _rounds_weight(module: nn.Module) -> bool:
    """Whether the layer rounds a plain weight in each pass, as one of optimum-quanto that is not frozen yet."""
    return getattr(module, "weight_qtype", None) is not None


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: one of `linear_kinds`, or a quantised layer of a package's own class.

    The latter is told by its numbers of inputs and outputs and by its codes. An adapter's layer has both, too: it is
    none itself, since it holds the layer that it changes.
    """
    if isinstance(module, linear_kinds()):
        return True
    numbers = _features(module)
    coded = all(isinstance(number, int) for number in numbers) and holds_codes(module)
    return coded and not any(is_linear(inner) for inner in module.children())


def quantiser(model: nn.Module) -> str | None:
    """The package whose tensors or layers stand in place of the weights of linear layers; None where all are plain.

    A package that quantises a model object leaves its configuration as it was, so the weights themselves tell.
    """
    for module in model.modules():
        weight = None if is_parametrized(module) else local_part(getattr(module, "weight", None))
        plain = isinstance(weight, Tensor) and _plain(weight) and not _rounds_weight(module)
        if is_parametrized(module) or not is_linear(module):
            continue
        if (package := rounding_package(module)) is not None:
            return package
        if plain:
            continue
        if _packed(module):
            return "torch.ao"
        for kind in (type(weight), type(module)):
            package, *inner = kind.__module__.split(".")
            if package not in ("torch", "builtins"):
                return inner[0] if package == "optimum" and inner else package
    return None


def widths(linear: nn.Module) -> tuple[int, int]:
    """Numbers of inputs and outputs of a linear layer; GPT-2's keeps its weight as [in, out]."""
    if isinstance(linear, conv1d()):
        inputs, outputs = linear.get_parameter("weight").shape
        return inputs, outputs
    inputs, outputs = _features(linear)
    return int(inputs), int(outputs)


def _features(linear: nn.Module) -> tuple[Any, Any]:
    """Numbers of inputs and outputs as a layer names them, AutoRound's without an underscore; None where it names
    none."""
    inputs, outputs = (
        getattr(linear, f"{side}_features", getattr(linear, f"{side}features", None)) for side in ("in", "out")
    )
    return inputs, outputs


def _home(projection: nn.Module, width: int) -> dict[str, Any]:
    """The device of the projection and a dtype that it reads: its first wide tensor's, unless it refuses this one.

    A quantised layer may have scales of another dtype than it computes in.
    """
    held = [*projection.parameters(), *projection.buffers()]
    first = next((tensor.dtype for tensor in held if _wide(tensor)), torch.float32)
    device = next((tensor.device for tensor in held if not tensor.is_meta), torch.device("cpu"))
    for dtype in (first, torch.bfloat16, torch.float16, torch.float32):
        with suppress(RuntimeError):
            _applied(projection, torch.zeros(1, width, dtype=dtype, device=device))
            return {"device": device, "dtype": dtype}
    return {"device": device, "dtype": first}


def _asked(projection: nn.Module, applied: bool = False) -> nn.Module:
    """The layer to ask for its weight: in somebody else's program a copy in eval mode of one that might change, since
    what it does for us would count as a pass: dropout takes random numbers, a calibration sees the identity, a
    spectral norm takes a step. `applied`: it is to be applied, not its weight read.

    A layer that accelerate moves between devices is asked itself: its hook would copy the weights of the whole model.
    """
    if measuring() or not (applied or is_parametrized(projection)) or [*execution_devices(projection)]:
        return projection
    with suppress(RuntimeError, TypeError):  # a layer may hold what cannot be copied
        return deepcopy(projection).eval()
    return projection


@contextmanager
def _unrounded(projection: nn.Module) -> Iterator[None]:
    """Lets layers that round in each pass round their weight alone: a scale that a calibration fixed for what they read
    would cut the identity."""
    with ExitStack() as stack:
        for layer in projection.modules():
            if rounding_package(layer):
                stack.enter_context(round_weight_alone(layer))
        yield


def _applied(projection: nn.Module, rows: Tensor) -> Tensor:
    """The projection's output; layers of quantised models may return their scales beside it.

    A watch keeps other people's hooks out of this. A scan does not: the hooks of --tp are a part of its model.
    """
    with unheard() if measuring() else forwards_only():
        output = projection(rows)
    return first_returned(output)


def _plain(weight: Tensor) -> bool:
    """Whether a weight holds its numbers as they are: a plain tensor, not a quantisation's subclass, of 16 bits or
    more."""
    return type(weight) in (Tensor, nn.Parameter) and _wide(weight)


def _wide(weight: Tensor) -> bool:
    """Whether a weight's numbers have 16 bits or more, or say that they have: a quantised one names its layer's."""
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def local_part(weight: Any) -> Any:
    """The part of a weight that this process holds where --tp spreads it over processes; else the weight itself."""
    return weight.to_local() if hasattr(weight, "to_local") else weight

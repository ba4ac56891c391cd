"""Every undocumented part of transformers, torch and accelerate that sinkscope uses, each behind one function.

Any release may move such a part. Its function then raises a SinkscopeError that names the library, its version and the
part; `tests/capture/test_private_doors.py` calls them all on the installed versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib.metadata import version
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, pytorch_utils

from sinkscope.errors import SinkscopeError


def moved(library: str, name: str) -> SinkscopeError:
    """Returns the error for a part `name` of `library` that is not where sinkscope expects it."""
    return SinkscopeError(
        f"{library} {version(library)} has no {name}, which sinkscope relies on: try an older {library} or a newer "
        "sinkscope"
    )


def part(library: str, owner: Any, name: str) -> Any:
    """The attribute of `owner` named by the last part of `name`. Raises SinkscopeError where it is gone."""
    try:
        return getattr(owner, name.rpartition(".")[2])
    except AttributeError:
        raise moved(library, name) from None


# transformers: the registries of attention functions and of mask functions


def registry_of(interface: type[Any]) -> MutableMapping[str, Any]:
    """The registry behind one of the two interfaces (AttentionInterface, AttentionMaskInterface), by name.

    `interface.register` adds to it; no public function removes, or lists what transformers registers itself.
    """
    return part("transformers", interface, f"{interface.__name__}._global_mapping")


def set_registry(interface: type[Any], registry: MutableMapping[str, Any]) -> None:
    """Makes every instance of the interface look names up in `registry`."""
    registry_of(interface)  # raises where the attribute moved: setting a new one would have no effect
    interface._global_mapping = registry


def interface_lookup() -> Callable[..., Any]:
    """The method by which a model looks up its attention function: (interface, name, default) -> function."""
    from transformers import AttentionInterface

    lookup: Callable[..., Any] = part("transformers", AttentionInterface, "AttentionInterface.get_interface")
    return lookup


def set_interface_lookup(lookup: Callable[..., Any]) -> None:
    """Makes every interface of attention functions look functions up by `lookup`."""
    from transformers import AttentionInterface

    interface_lookup()  # raises where the method moved: setting a new one would have no effect
    AttentionInterface.get_interface = lookup


def shared_registries() -> dict[str, Mapping[str, Any]]:
    """The two registries as most models see them, with what was assigned to the shared instances alone."""
    from transformers import masking_utils, modeling_utils

    return {
        "attention": part("transformers", modeling_utils, "modeling_utils.ALL_ATTENTION_FUNCTIONS"),
        "mask": part("transformers", masking_utils, "masking_utils.ALL_MASK_ATTENTION_FUNCTIONS"),
    }


def mask_arguments(make: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call of the mask function `make`, by name."""
    signature = inspect.signature(make)
    for name in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function"):
        if name not in signature.parameters:  # the function would take it among its other keywords, and ignore it
            raise moved("transformers", f"mask functions' argument {name!r}")
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    rest = arguments.pop("kwargs", {})
    return arguments | rest


def mask_sizes(given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Batch size, queries and keys of the mask that a mask function makes from these arguments."""
    return given["batch_size"], given["q_length"], given["kv_length"]


def mask_window(given: Mapping[str, Any]) -> int | None:
    """The sliding window of the mask that a mask function makes from these arguments; None where it has none. Chunks
    are passed in the same way, but no configuration calls them its window."""
    size = given.get("local_size")
    return size if size == getattr(given.get("config"), "sliding_window", None) else None


def asking(given: Mapping[str, Any], allowed: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of the same mask, but for the function that tells which key a query sees."""
    return {**given, "mask_function": allowed}


def mask_strip(make: Callable[..., Any], given: Mapping[str, Any], rows: range, keys: range) -> Tensor:
    """Some rows and keys of the mask that `make` makes from these arguments, never left out as None."""
    row, column = given.get("q_offset", 0), given.get("kv_offset", 0)
    corner = {"q_offset": row + rows.start, "kv_offset": column + keys.start}
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made = make(**{**given, **corner, **whole, "q_length": len(rows), "kv_length": len(keys)})
    if made is None:
        raise moved("transformers", "mask functions' arguments 'allow_is_causal_skip', 'allow_is_bidirectional_skip'")
    return made


# transformers: the attention that a configuration chooses, and the classes of a model type


def attention_name(config: Any) -> str | None:
    """The name of the attention that this configuration chooses; None where it is no PreTrainedConfig."""
    if not isinstance(config, PreTrainedConfig):
        return None
    return part("transformers", config, "PreTrainedConfig._attn_implementation_internal")


def set_attention_name(config: PreTrainedConfig, name: str | None) -> None:
    """Chooses the attention of this configuration alone; the public way changes its sub-configurations too."""
    attention_name(config)  # raises where the attribute moved: setting a new one would have no effect
    config._attn_implementation_internal = name


def rotates_by_length(model: nn.Module) -> bool:
    """Whether the model's rotary frequencies depend on the length of what it reads: two kinds of transformers do."""
    return any(kind in repr(getattr(model, "config", None)) for kind in ("longrope", "dynamic"))


def base_class(config: Any) -> Any:
    """The class that AutoModel builds from this configuration; None for a type it does not know."""
    try:
        return part("transformers", AutoModel, "AutoModel._model_mapping")[type(config)]
    except KeyError:
        return None


def has_sdpa(family: Any) -> bool:
    """Whether models of this class can be loaded with `attn_implementation="sdpa"`."""
    part("transformers", PreTrainedModel, "PreTrainedModel._supports_sdpa")
    return bool(getattr(family, "_supports_sdpa", False))


def causal_class_names() -> set[str]:
    """Names of the model classes that predict the next token."""
    from transformers.models.auto import modeling_auto

    name = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    return set(part("transformers", modeling_auto, f"modeling_auto.{name}").values())


def capturing(model: nn.Module) -> bool | None:
    """Whether transformers has put hooks into this model that collect the maps it returns; None where it never did."""
    return vars(model).get(_capturing_flag())


def set_capturing(model: nn.Module, state: bool | None) -> None:
    """Tells transformers whether its hooks are in this model; None where it never put any."""
    vars(model).pop(_capturing_flag(), None)
    if state is not None:
        vars(model)[_capturing_flag()] = state


def _capturing_flag() -> str:
    """The attribute that transformers sets on a model with such hooks. A model without any lacks it, so that only
    transformers' own code tells whether it is still called so."""
    from transformers.utils import output_capturing

    name = "_output_capturing_hooks_installed"
    install = part("transformers", output_capturing, "output_capturing.maybe_install_capturing_hooks")
    if name not in install.__code__.co_consts:
        raise moved("transformers", f"{name} in maybe_install_capturing_hooks")
    return name


# transformers: layers


def conv1d() -> type[nn.Module]:
    """The class of GPT-2's linear layers, whose weight is [in, out]."""
    kind: type[nn.Module] = part("transformers", pytorch_utils, "pytorch_utils.Conv1D")
    return kind


def linear_kinds() -> tuple[type[nn.Module], type[nn.Module]]:
    """The classes of layers that multiply by a matrix: nn.Linear, whose weight is [out, in], and `conv1d()`."""
    return nn.Linear, conv1d()


BITNET = "transformers.integrations.bitnet"


def is_bitnet(layer: nn.Module) -> bool:
    """Whether a layer is one of BitNet's, which round what they read in each pass. They are told by their module's
    name, since its import compiles functions, which takes seconds."""
    return type(layer).__module__ == BITNET


# compressed-tensors and modelopt: layers that round numbers in each pass


SCHEME = "quantization_scheme"
"""compressed-tensors' note in a layer of how it was quantised."""

QUANTIZERS = ("input_quantizer", "output_quantizer")
"""modelopt's modules in a layer for what it reads and returns."""


def rounding_package(layer: nn.Module) -> str | None:
    """The package whose layer rounds numbers in each pass: its weight, what it reads or what it returns. None for
    another layer."""
    if getattr(layer, SCHEME, None) is not None:
        return "compressed-tensors"
    return "modelopt" if any(hasattr(layer, name) for name in QUANTIZERS) else None


@contextmanager
def round_weight_alone(layer: nn.Module) -> Iterator[None]:
    """Lets a layer of a `rounding_package` take what it reads, and return what it computes, as they are, until the
    block ends."""
    scheme = getattr(layer, SCHEME, None)
    quantizers = [getattr(layer, name) for name in QUANTIZERS if hasattr(layer, name)]
    on = [quantizer for quantizer in quantizers if getattr(quantizer, "is_enabled", False)]
    try:
        if scheme is not None:
            alone = scheme.model_copy(update={"input_activations": None, "output_activations": None})
            layer.quantization_scheme = alone
        for quantizer in on:
            quantizer.disable()
        yield
    finally:
        if scheme is not None:
            layer.quantization_scheme = scheme
        for quantizer in on:
            quantizer.enable()


# torch: tensors without storage or made of others, how often one was written into, compiled modules, multi-head
# attention


def empty_wrapper(kind: type[Any], shape: list[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of the subclass `kind` that has a shape but no storage."""
    make = part("torch", Tensor, "Tensor._make_wrapper_subclass")
    return make(kind, shape, dtype=dtype, device=device)


def times_written(tensor: Tensor) -> int:
    """How often a tensor has been written into; 0 where torch does not count (inference mode)."""
    try:  # `part` takes five times as long, and a watched step asks this a dozen times in every layer
        return tensor._version
    except AttributeError:
        raise moved("torch", "Tensor._version") from None
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise


def in_backward() -> bool:
    """Whether this thread computes gradients, as where activation checkpointing computes a block again."""
    return bool(part("torch", torch._C, "_C._current_graph_task_id")() != -1)


def without_numbers() -> bool:
    """Whether torch records or transforms what runs, so that tensors hold no numbers, or those of many passes at once:
    torch.jit.trace, torch.export, make_fx, fake tensors, torch.func's vmap and grad."""
    return bool(
        part("torch", torch.jit, "jit.is_tracing")()
        or part("torch", torch._C._functorch, "_C._functorch.peek_interpreter_stack")() is not None
        or part("torch", torch._guards, "_guards.detect_fake_mode")() is not None
        or part("torch", proxy_tensor, "fx.experimental.proxy_tensor.get_proxy_mode")() is not None
    )


def writes(operator: Any) -> bool:
    """Whether an operator, as `__torch_dispatch__` receives it, writes into one of its arguments."""
    return bool(part("torch", operator, "OpOverload._schema").is_mutable)


def written_by(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that one call of an operator, as `__torch_dispatch__` receives it, writes into."""
    if not writes(operator):
        return []
    arguments = operator._schema.arguments
    values = dict(zip([formal.name for formal in arguments], args, strict=False)) | dict(kwargs)
    written = [values.get(formal.name) for formal in arguments if formal.alias_info and formal.alias_info.is_write]
    flat = [item for value in written for item in (value if isinstance(value, list | tuple) else [value])]
    return [item for item in flat if isinstance(item, Tensor)]


def before_operations(see: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]) -> AbstractContextManager[Any]:
    """Calls `see(operator, arguments, keywords)` before every operation that this thread runs in the block."""
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        raise moved("torch", "torch.utils._python_dispatch.TorchDispatchMode") from None

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Seeing()


def map_tensors(kind: type[Any], change: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `change` to every object of class `kind` in `tree` (lists, tuples, dicts)."""
    try:
        from torch.utils._pytree import tree_map_only
    except ImportError:
        raise moved("torch", "torch.utils._pytree.tree_map_only") from None
    return tree_map_only(kind, change, tree)


def weak_tensor_table() -> MutableMapping[Tensor, Any]:
    """A dictionary keyed by tensors: compared by identity, held by weak references."""
    try:
        from torch.utils.weak import WeakTensorKeyDictionary
    except ImportError:
        raise moved("torch", "torch.utils.weak.WeakTensorKeyDictionary") from None
    return WeakTensorKeyDictionary()


def forward_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """A module's forward hooks, by the number that their registration gave them."""
    return part("torch", module, "Module._forward_hooks")


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor subclass says it is made of; none where it does not say."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module that torch.compile has wrapped; None where this is no such wrapper."""
    try:
        from torch._dynamo import OptimizedModule
    except ImportError:
        raise moved("torch", "torch._dynamo.OptimizedModule") from None
    return part("torch", module, "OptimizedModule._orig_mod") if isinstance(module, OptimizedModule) else None


def open_multi_head_attention() -> Callable[..., Any]:
    """torch's multi-head attention, as a copy whose inner projections, softmax and products a TorchFunctionMode sees.

    torch's own function passes itself to an active mode as a single call. In the copy, its test for an active mode
    (`has_torch_function`) always returns False, so it runs its code instead.
    """
    original, test = functional.multi_head_attention_forward, "has_torch_function"
    code = part("torch", original, "multi_head_attention_forward.__code__")
    if test not in code.co_names:
        raise moved("torch", f"{test} in multi_head_attention_forward")
    namespace = {**original.__globals__, test: lambda tensors: False}
    copy = FunctionType(code, namespace, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


# accelerate: whether memory ran out, and the devices of a module's weights


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, on any device, says that memory ran out."""
    from accelerate.utils import memory

    return bool(part("accelerate", memory, "utils.memory.should_reduce_batch_size")(error))


def execution_devices(model: nn.Module) -> Iterable[Any]:
    """The devices on which accelerate runs the modules, in the order of the modules.

    A model that accelerate has spread over devices has `hf_device_map`, and then at least one module has a hook.
    """
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    if not hooks and hasattr(model, "hf_device_map"):
        raise moved("accelerate", "Module._hf_hook")
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return [device for device in devices if device is not None]


# torch: how long joined processes wait for each other, and whether one of them is gone


def set_process_timeout(patience: timedelta) -> None:
    """Lets the processes of the launch wait this long for each other: torch takes a timeout at its start only."""
    from torch.distributed import distributed_c10d

    store = part("torch", distributed_c10d, "distributed_c10d._get_default_store")
    store().set_timeout(patience)
    public = getattr(distributed_c10d, "set_timeout", None)  # since torch 2.14
    timeout = public or part("torch", distributed_c10d, "distributed_c10d._set_pg_timeout")
    timeout(patience)


def lost_process(error: BaseException) -> bool:
    """Whether an error of an exchange between processes says that another one is gone. Gloo has no class for it."""
    return "gloo/transport" in str(error) or type(error).__name__.startswith("Dist")


# torch: whether a convolution was given less than its kernel


def is_smaller_than_kernel(error: BaseException) -> bool:
    """Whether a convolution refused an input that is shorter or smaller than its kernel. Torch has no class for it."""
    return isinstance(error, RuntimeError) and "Kernel size can't be greater than actual input size" in str(error)


# torch: every operation of a thread, the memory behind a tensor, and counts of floating-point operations


def dispatch_mode() -> type[Any]:
    """The class of contexts that receive each operator of torch, below autograd."""
    from torch.utils import _python_dispatch

    kind: type[Any] = part("torch", _python_dispatch, "_python_dispatch.TorchDispatchMode")
    return kind


def storage_number(tensor: Tensor) -> int:
    """A number that the memory of a tensor has as long as it is held; views of a tensor share it."""
    return int(part("torch", tensor.untyped_storage(), "UntypedStorage._cdata"))


def flop_counts() -> dict[Any, Callable[..., Any]]:
    """What counts the floating-point operations of an operator, by operator."""
    from torch.utils import flop_counter

    counts: dict[Any, Callable[..., Any]] = part("torch", flop_counter, "flop_counter.flop_registry")
    return counts


def grouped_product() -> Any:
    """The operator that multiplies each row of a matrix by the matrix of its group, as experts do: [row, inner] and
    [group, inner, column]. On shapes torch knows it in bfloat16 alone, and it counts no operations of it."""
    return part("torch", torch.ops.aten, "aten._grouped_mm")

"""The contract with undocumented parts of transformers, torch and accelerate: each function of `private_doors` works on
the installed versions, and where a part is gone its error names it. Runs at both ends of the supported range."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.utils import memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree, weak
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    EncoderDecoderCache,
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    cache_utils,
    masking_utils,
    modeling_utils,
    pytorch_utils,
)
from transformers.generation.continuous_batching import continuous_api
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.utils import output_capturing

import sinkscope
from sinkscope.capture import generation_doors as written_doors
from sinkscope.capture import private_doors as doors
from sinkscope.errors import SinkscopeError

SMALL: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


class Called(TorchFunctionMode):
    """Records the names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def attend(function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    result: tuple[Tensor, Tensor] = function(
        x, x, x, 8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight,
        layer.out_proj.bias,
    )  # fmt: skip
    return result


def test_attention_functions_are_those_that_models_look_up() -> None:
    registry = doors.registry_of(AttentionInterface)
    AttentionInterface.register("of_this_test", attend)
    assert AttentionInterface()["of_this_test"] is attend
    assert registry.pop("of_this_test") is attend
    assert "of_this_test" not in AttentionInterface()
    assert "sdpa" in registry


def test_models_look_their_attention_function_up_through_the_interface() -> None:
    before = doors.interface_lookup()

    def lookup(interface: Any, name: str, default: Any) -> Any:
        return attend if name == "asked by this test" else before(interface, name, default)

    try:
        doors.set_interface_lookup(lookup)
        assert AttentionInterface().get_interface("asked by this test", None) is attend
        assert AttentionInterface().get_interface("eager", attend) is attend
    finally:
        doors.set_interface_lookup(before)
    assert doors.interface_lookup() is before


@pytest.mark.parametrize("name", ["reorder_cache", "crop"])
def test_caches_are_changed_through_their_methods(name: str) -> None:
    called, before = [], written_doors.cache_methods(name)
    inner, outer = DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())
    try:
        for kind, method in before.items():
            written_doors.set_cache_method(
                kind, name, lambda cache, what, method=method: (called.append(cache), method(cache, what))
            )
        getattr(inner, name)(torch.tensor([0]) if name == "reorder_cache" else 0)
        getattr(outer, name)(torch.tensor([0]) if name == "reorder_cache" else 0)
    finally:
        for kind, method in before.items():
            written_doors.set_cache_method(kind, name, method)
    assert called[:2] == [inner, outer]
    assert written_doors.cache_methods(name) == before


@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_that_grows_gives_back_its_slots_and_the_new_ones(window: int | None) -> None:
    [kind] = [kind for kind in written_doors.growing_layers() if ("Sliding" in kind.__name__) == (window is not None)]
    layer = kind() if window is None else kind(sliding_window=window)
    held = torch.zeros(1, 2, 0, 3)
    for count in (2, 3, 1):
        new = torch.randn(1, 2, count, 3)
        keys, values = layer.update(new, -new)
        assert torch.equal(keys, torch.cat([held, new], 2))
        assert torch.equal(values, -keys)
        held = keys if window is None else keys[:, :, 1 - window :]
        assert torch.equal(layer.keys, held)
        assert torch.equal(layer.values, -held)


def test_layers_that_grow_are_changed_through_their_method() -> None:
    before, called = written_doors.growing_layers(), []
    for kind, method in before.items():
        written_doors.set_growing(
            kind, lambda layer, *given, method=method: called.append(layer) or method(layer, *given)
        )
    layer = DynamicCache().layer_class_to_replicate()
    try:
        layer.update(*torch.randn(2, 1, 2, 3, 4))
        assert not written_doors.growing_layers(), "another's methods may do anything"
    finally:
        for kind, method in before.items():
            written_doors.set_growing(kind, method)
    assert called == [layer]
    assert written_doors.growing_layers() == before


def test_generate_asks_after_each_token_which_texts_have_ended() -> None:
    plain, told = written_doors.stopping_test(), list[tuple[int, list[int]]]()

    def asked(criteria: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        told.append((ids.shape[1], written_doors.end_tokens(criteria)))
        return plain(criteria, ids, *args, **kwargs)

    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.generation_config.eos_token_id = 3
    written_doors.set_stopping_test(asked)
    try:
        for ends in ({}, {"eos_token_id": [5, 6]}):
            model.generate(
                torch.tensor([[1, 2]]), max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0, **ends
            )
    finally:
        written_doors.set_stopping_test(plain)
    assert told == [(3, [3]), (4, [3]), (3, [5, 6]), (4, [5, 6])]
    assert written_doors.stopping_test() is plain


def test_a_continuous_batch_runs_each_pass_through_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plain = written_doors.batch_step()
    seen: list[Any] = []

    def step(batches: Any, model: nn.Module) -> None:
        found = written_doors.requests_of(batches)
        seen.append(
            (
                found,
                [written_doors.under_way(batches, name) for name, *_ in found],
                written_doors.replayed(batches),
            )
        )
        plain(batches, model)

    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    size = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    written_doors.set_batch_step(kind, step)
    try:
        model.generate_batch(
            [[1, 2, 3, 4, 5]], generation_config=GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(**{size: 4}, num_blocks=8, max_batch_tokens=3),
            progress_bar=False,
        )  # fmt: skip
    finally:
        written_doors.set_batch_step(kind, plain)
    assert [found for found, *_ in seen] == [[("req_0", 0, 3)], [("req_0", 3, 2)], [("req_0", 5, 1)]]
    assert [(under_way, replayed) for _, under_way, replayed in seen] == [([True], False)] * 3
    assert written_doors.batch_step() == (kind, plain)


def test_mask_functions_are_those_that_models_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    registry = doors.registry_of(AttentionMaskInterface)
    plain = registry["sdpa"]

    def noted(*args: Any, **kwargs: Any) -> Tensor | None:
        asked.append(doors.mask_sizes(doors.mask_arguments(plain, args, kwargs)))
        return plain(*args, **kwargs)

    monkeypatch.setitem(registry, "sdpa", noted)
    config = LlamaConfig(attn_implementation="sdpa")
    padded = torch.tensor([[0] + 6 * [1], 7 * [1]])
    mask = create_causal_mask(config, torch.zeros(2, 7, 4), padded, None, position_ids=None)
    assert mask.shape == (2, 1, 7, 7)
    assert asked == [(2, 7, 7)]
    assert AttentionMaskInterface()["sdpa"] is noted


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_strip_of_a_mask_is_that_part_of_the_whole_one(name: str) -> None:
    make = doors.registry_of(AttentionMaskInterface)[name]
    causal = lambda batch, head, query, key: key <= query  # noqa: E731
    padded = torch.tensor([[0] + 6 * [1], 7 * [1]]).bool()
    given = doors.mask_arguments(make, (2, 7, 7), {"mask_function": causal, "attention_mask": padded})
    assert doors.mask_sizes(given) == (2, 7, 7)
    whole = make(**given)
    assert torch.equal(doors.mask_strip(make, given, range(2, 5), range(1, 4)), whole[:, :, 2:5, 1:4])
    everywhere = doors.asking(given, lambda batch, head, query, key: key >= 0)
    assert not torch.equal(make(**everywhere), whole)
    left_out = {**given, "attention_mask": None, "allow_is_causal_skip": True}
    strip = doors.mask_strip(make, left_out, range(7), range(7))
    assert torch.equal(strip[0, 0], whole[1, 0])


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_mask_function_is_told_the_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = doors.registry_of(AttentionMaskInterface)
    plain, windows = registry[name], []

    def noted(*args: Any, **kwargs: Any) -> Tensor | None:
        windows.append(doors.mask_window(doors.mask_arguments(plain, args, kwargs)))
        return plain(*args, **kwargs)

    monkeypatch.setitem(registry, name, noted)
    config = LlamaConfig(attn_implementation=name)
    config.sliding_window, config.attention_chunk_size = 5, 3
    made = masking_utils.create_sliding_window_causal_mask, create_causal_mask, masking_utils.create_chunked_causal_mask
    for make in made:
        make(config, torch.zeros(1, 7, 4), None, None, position_ids=None)
    assert windows == [5, None, None]


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "llama3": {
        "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8
    },
    "longrope": {
        "factor": 2.0, "original_max_position_embeddings": 8, "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", dict.fromkeys(["default", *ROPE_INIT_FUNCTIONS]))
def test_rotary_frequencies_that_depend_on_the_length(kind: str) -> None:
    """The door says what the model does when it reads few tokens, and then more than it was trained on."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
        max_position_embeddings=8, rope_parameters=rope,
    )  # fmt: skip
    model = AutoModel.from_config(config)
    frequencies = []
    for length in (4, 32):
        model.rotary_emb(torch.zeros(1, length, 8), torch.arange(length)[None])
        frequencies.append(model.rotary_emb.inv_freq.clone())
    assert doors.rotates_by_length(model) == (not torch.equal(*frequencies))
    assert doors.rotates_by_length(model) == (kind in ("dynamic", "longrope"))


def test_linear_layers_of_both_kinds() -> None:
    model = AutoModel.from_config(AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=8))
    read = model.h[0].attn.c_attn
    assert type(read) is doors.conv1d()
    assert isinstance(read, doors.linear_kinds())
    assert isinstance(nn.Linear(2, 2), doors.linear_kinds())
    assert tuple(read.weight.shape) == (8, 24)


def test_layers_of_bitnet_are_told_by_their_module() -> None:
    """A real one is in tests/checkpoints/test_quantised.py: its module takes seconds to import."""
    assert find_spec(doors.BITNET) is not None
    assert not doors.is_bitnet(nn.Linear(2, 2))


def test_layers_that_round_in_each_pass_round_their_weight_alone() -> None:
    """compressed-tensors' own layers and copies of modelopt's are in tests/checkpoints/test_quantised.py."""
    plain = nn.Linear(2, 2)
    assert doors.rounding_package(plain) is None
    told: list[str] = []
    coded: Any = nn.Linear(2, 2)
    coded.input_quantizer = SimpleNamespace(
        is_enabled=True, disable=lambda: told.append("off"), enable=lambda: told.append("on")
    )
    coded.output_quantizer = SimpleNamespace(is_enabled=False)
    assert doors.rounding_package(coded) == "modelopt"
    with doors.round_weight_alone(coded):
        assert told == ["off"]
    assert told == ["off", "on"]


def test_a_launch_waits_as_long_as_it_is_told_after_its_start(tmp_path: Path) -> None:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=5)
    )
    try:
        doors.set_process_timeout(timedelta(hours=2))
        assert distributed.distributed_c10d._get_default_store().timeout == timedelta(hours=2)
    finally:
        distributed.destroy_process_group()


EXCHANGE = """
import os
import sys
import torch
from torch import distributed

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
distributed.barrier()
if rank == 0:
    try:
        while True:
            distributed.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
"""
"""Two processes meet. One ends, and the other prints what its next exchange raises, and ends at once: threads of gloo
may abort a process that exits in the ordinary way."""


@pytest.mark.slow
def test_gloo_says_that_the_other_process_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXCHANGE]
    with subprocess.Popen([*command, "1", str(tmp_path / "store")], stderr=subprocess.DEVNULL):
        told = subprocess.run(
            [*command, "0", str(tmp_path / "store")], capture_output=True, text=True, check=True, timeout=60
        )
    assert told.stdout
    assert doors.lost_process(RuntimeError(told.stdout))


def test_only_errors_of_an_exchange_say_that_a_process_is_gone() -> None:
    from torch import distributed

    assert doors.lost_process(RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"))
    assert doors.lost_process(distributed.DistBackendError("NCCL communicator was aborted on rank 0."))
    assert not doors.lost_process(RuntimeError("CUDA out of memory."))


def test_a_convolution_says_that_its_input_is_smaller_than_its_kernel() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.nn.Conv1d(1, 1, 10)(torch.zeros(1, 1, 5))
    assert doors.is_smaller_than_kernel(found.value)
    assert not doors.is_smaller_than_kernel(RuntimeError("a layer failed"))


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_a_registry_is_replaced_for_every_instance(interface: Any) -> None:
    before = doors.registry_of(interface)
    try:
        doors.set_registry(interface, {"sdpa": attend})
        assert interface()["sdpa"] is attend
    finally:
        doors.set_registry(interface, before)
    assert doors.registry_of(interface) is before


def test_the_shared_registries_show_what_was_assigned_to_them_alone() -> None:
    for what, interface in (("attention", AttentionInterface), ("mask", AttentionMaskInterface)):
        plain = doors.registry_of(interface)
        shared: Any = doors.shared_registries()[what]
        assert shared["sdpa"] is plain["sdpa"]
        shared["sdpa"] = attend
        assert doors.shared_registries()[what]["sdpa"] is attend
        assert plain["sdpa"] is not attend
        del shared["sdpa"]


def test_an_attention_s_name_is_chosen_for_one_configuration_alone() -> None:
    config = Gemma3Config(attn_implementation="sdpa")
    doors.set_attention_name(config, "eager")
    assert doors.attention_name(config) == config._attn_implementation == "eager"
    assert doors.attention_name(config.text_config) == config.text_config._attn_implementation == "sdpa"
    assert doors.attention_name(SimpleNamespace()) is None


def test_classes_of_a_model_type() -> None:
    assert doors.base_class(LlamaConfig()).__name__ == "LlamaModel"
    assert doors.has_sdpa(doors.base_class(LlamaConfig()))
    assert not doors.has_sdpa(doors.base_class(AutoConfig.for_model("gpt_oss")))
    assert doors.base_class(SimpleNamespace()) is None
    assert not doors.has_sdpa(None)
    assert {"LlamaForCausalLM", "GPT2LMHeadModel"} <= doors.causal_class_names()
    assert "BertModel" not in doors.causal_class_names()


def test_wrapper_tensors_counts_and_trees() -> None:
    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            written.append(doors.writes(function))
            return function(*doors.map_tensors(Wrapped, lambda _: torch.ones(2, 3), args), **(kwargs or {}))

    written: list[bool] = []
    empty = doors.empty_wrapper(Wrapped, [2, 3], torch.float32, torch.device("cpu"))
    assert (empty.shape, empty.dtype) == ((2, 3), torch.float32)
    assert torch.equal(empty + 1, torch.full((2, 3), 2.0))
    empty.add_(1)
    assert written == [False, True]
    plain = torch.zeros(2)
    before = doors.times_written(plain)
    plain.add_(1)
    assert doors.times_written(plain) == before + 1
    with torch.inference_mode():
        assert doors.times_written(torch.zeros(2)) == 0


def test_a_thread_that_computes_gradients_is_known() -> None:
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            told.append(doors.in_backward())
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            told.append(doors.in_backward())
            return gradients[0] * 2

    told: list[bool] = []
    Asks.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert told == [False, True]
    assert not doors.in_backward()


@pytest.mark.filterwarnings("ignore:.*jit")
def test_whether_tensors_hold_no_numbers_of_their_own() -> None:
    told: list[bool] = []

    def asks(x: Tensor) -> Tensor:
        told.append(doors.without_numbers())
        return x * 2

    asks(torch.ones(2))
    torch.jit.trace(asks, torch.ones(2), check_trace=False)
    proxy_tensor.make_fx(asks)(torch.ones(2))
    torch.func.vmap(asks)(torch.ones(2))
    with FakeTensorMode():
        asks(torch.ones(2))
    assert told == [False, True, True, True, True]
    assert not doors.without_numbers()


def test_the_arguments_that_an_operation_writes_into() -> None:
    seen: list[tuple[str, list[int]]] = []

    def see(operator: Any, args: Any, kwargs: Any) -> None:
        seen.append((operator.__name__, [id(tensor) for tensor in doors.written_by(operator, args, kwargs)]))

    first, second = torch.zeros(3), torch.ones(3)
    with doors.before_operations(see):
        first + second
        first.add_(second)
        torch.mul(second, 2, out=first)
        torch._foreach_add_([first, second], 1)
    assert seen == [
        ("add.Tensor", []), ("add_.Tensor", [id(first)]), ("mul.out", [id(first)]),
        ("_foreach_add_.Scalar", [id(first), id(second)]),
    ]  # fmt: skip


def test_the_hooks_that_collect_maps_are_known_and_forgotten() -> None:
    model: Any = AutoModel.from_config(AutoConfig.for_model("llama", **SMALL))
    assert doors.capturing(model) is None
    model(torch.arange(4)[None], output_hidden_states=True)
    assert doors.capturing(model)
    assert len(doors.forward_hooks(model.layers[0])) == 1
    doors.forward_hooks(model.layers[0]).clear()
    doors.set_capturing(model, False)
    assert doors.capturing(model) is False
    doors.set_capturing(model, None)
    assert doors.capturing(model) is None
    assert len(model(torch.arange(4)[None], output_hidden_states=True).hidden_states) == 2
    assert len(doors.forward_hooks(model.layers[0])) == 1


def test_tensors_inside_a_tensor() -> None:
    class Pair(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["left", "right"], None

    pair: Any = torch.ones(2).as_subclass(Pair)
    pair.left, pair.right = torch.zeros(1), torch.zeros(2)
    assert doors.inner_tensors(pair) == [pair.left, pair.right]
    assert doors.inner_tensors(torch.ones(2)) == []


@pytest.mark.slow
def test_the_module_inside_a_compiled_one() -> None:
    layer = nn.Linear(2, 2)
    compiled: Any = torch.compile(layer, backend="eager")
    assert doors.compiled_from(compiled) is layer
    assert doors.compiled_from(layer) is None


@pytest.mark.slow
def test_a_weak_table_lets_its_tensors_go() -> None:
    table, kept, gone = doors.weak_tensor_table(), torch.zeros(2), torch.zeros(2)
    table[kept], table[gone] = "kept", "gone"
    del gone
    gc.collect()
    assert len(table) == 1
    assert table[kept] == "kept"


def test_multi_head_attention_is_open_to_a_mode_and_computes_the_same() -> None:
    own = nn.functional.multi_head_attention_forward
    with Called() as whole:
        expected = attend(own)
    with Called() as parts:
        ours = attend(doors.open_multi_head_attention())
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    assert "multi_head_attention_forward" in whole.names
    assert "softmax" not in whole.names
    assert "multi_head_attention_forward" not in parts.names
    assert "softmax" in parts.names


def test_errors_of_memory_that_ran_out() -> None:
    for words in ("CUDA out of memory. Tried to allocate 2.00 GiB.", "DefaultCPUAllocator: can't allocate memory"):
        assert doors.is_out_of_memory(RuntimeError(words)), words
    assert doors.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**55)
    assert doors.is_out_of_memory(found.value)
    assert not doors.is_out_of_memory(RuntimeError("a layer failed"))
    assert not doors.is_out_of_memory(ValueError("CUDA out of memory."))


def test_accelerate_says_where_a_module_runs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert list(doors.execution_devices(model)) == []
    cpu_offload(model, torch.device("cpu"))
    assert {torch.device(device) for device in doors.execution_devices(model)} == {torch.device("cpu")}
    model.hf_device_map = {"": "disk"}
    assert torch.device("cpu") in {torch.device(device) for device in doors.execution_devices(model)}


def test_what_counts_a_pass_on_shapes() -> None:
    seen: list[Any] = []

    class Seeing(doors.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen
    held = torch.zeros(4)
    assert doors.storage_number(held) == doors.storage_number(held[1:]) != doors.storage_number(torch.zeros(4))
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert doors.flop_counts()[torch.ops.aten.mm](a, b, out_val=a @ b) == 2 * 2 * 3 * 4


def test_the_product_of_experts_takes_rows_by_their_group() -> None:
    x, w = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    assert doors.grouped_product()(x.to("meta"), w.to("meta"), ends.to("meta")).shape == (4, 8)


def remove(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Removes an attribute from a module or an object; from a class, also from every class that it inherits from."""
    for each in getattr(owner, "__mro__", (owner,)):
        if name in vars(each):
            patch.delattr(each, name)


class Uncounted(Tensor):
    @property
    def _version(self) -> int:
        raise AttributeError


def bare_config() -> Any:
    config = LlamaConfig()
    del config._attn_implementation_internal
    return config


def module_without_hooks() -> nn.Module:
    module = nn.Module()
    del module.__dict__["_forward_hooks"]
    return module


def spread_without_hooks() -> nn.Module:
    model: Any = nn.Linear(2, 2)
    model.hf_device_map = {"": "disk"}
    return model


def asks_nothing(query: Tensor) -> Tensor:
    """A multi-head attention that does not call has_torch_function."""
    return query


Break = Callable[[pytest.MonkeyPatch], object]
WHOLE: Break = lambda patch: None  # noqa: E731
GONE: list[tuple[str, str, Break, Callable[[], Any]]] = [
    ("transformers", "AttentionInterface._global_mapping",
     lambda patch: remove(patch, AttentionInterface, "_global_mapping"),
     lambda: doors.registry_of(AttentionInterface)),
    ("transformers", "AttentionMaskInterface._global_mapping",
     lambda patch: remove(patch, AttentionMaskInterface, "_global_mapping"),
     lambda: doors.registry_of(AttentionMaskInterface)),
    ("transformers", "AttentionInterface._global_mapping",
     lambda patch: remove(patch, AttentionInterface, "_global_mapping"),
     lambda: doors.set_registry(AttentionInterface, {})),
    ("transformers", "modeling_utils.ALL_ATTENTION_FUNCTIONS",
     lambda patch: remove(patch, modeling_utils, "ALL_ATTENTION_FUNCTIONS"), doors.shared_registries),
    ("transformers", "masking_utils.ALL_MASK_ATTENTION_FUNCTIONS",
     lambda patch: remove(patch, masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS"), doors.shared_registries),
    ("transformers", "mask functions' argument 'q_offset'", WHOLE,
     lambda: doors.mask_arguments(lambda batch_size, q_length, kv_length, **rest: None, (1, 2, 2), {"q_offset": 1})),
    ("transformers", "mask functions' arguments 'allow_is_causal_skip', 'allow_is_bidirectional_skip'", WHOLE,
     lambda: doors.mask_strip(lambda **given: None, {}, range(2), range(2))),
    ("transformers", "_output_capturing_hooks_installed in maybe_install_capturing_hooks",
     lambda patch: patch.setattr(output_capturing, "maybe_install_capturing_hooks", asks_nothing),
     lambda: doors.capturing(nn.Linear(2, 2))),
    ("transformers", "output_capturing.maybe_install_capturing_hooks",
     lambda patch: remove(patch, output_capturing, "maybe_install_capturing_hooks"),
     lambda: doors.set_capturing(nn.Linear(2, 2), None)),
    ("transformers", "pytorch_utils.Conv1D", lambda patch: remove(patch, pytorch_utils, "Conv1D"), doors.linear_kinds),
    ("transformers", "PreTrainedConfig._attn_implementation_internal", WHOLE,
     lambda: doors.attention_name(bare_config())),
    ("transformers", "PreTrainedConfig._attn_implementation_internal", WHOLE,
     lambda: doors.set_attention_name(bare_config(), "eager")),
    ("transformers", "AutoModel._model_mapping", lambda patch: remove(patch, AutoModel, "_model_mapping"),
     lambda: doors.base_class(LlamaConfig())),
    ("transformers", "Cache.reorder_cache", lambda patch: remove(patch, Cache, "reorder_cache"),
     lambda: written_doors.cache_methods("reorder_cache")),
    ("transformers", "ContinuousBatchProcessor._generation_step",
     lambda patch: remove(patch, continuous_api.ContinuousBatchProcessor, "_generation_step"),
     written_doors.batch_step),
    ("transformers", "ContinuousBatchProcessor.inputs_and_outputs", WHOLE,
     lambda: written_doors.requests_of(SimpleNamespace())),
    ("transformers", "ContinuousBatchProcessor.model_runner", WHOLE, lambda: written_doors.replayed(SimpleNamespace())),
    ("transformers", "ContinuousBatchProcessor.scheduler", WHOLE,
     lambda: written_doors.under_way(SimpleNamespace(), "request")),
    ("transformers", "cache_utils.DynamicSlidingWindowLayer",
     lambda patch: remove(patch, cache_utils, "DynamicSlidingWindowLayer"), written_doors.growing_layers),
    ("transformers", "PreTrainedModel._supports_sdpa",
     lambda patch: remove(patch, PreTrainedModel, "_supports_sdpa"), lambda: doors.has_sdpa(None)),
    ("transformers", "modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
     lambda patch: remove(patch, modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"), doors.causal_class_names),
    ("torch", "Tensor._make_wrapper_subclass", lambda patch: patch.setattr(doors, "Tensor", SimpleNamespace()),
     lambda: doors.empty_wrapper(Tensor, [2], torch.float32, torch.device("cpu"))),
    ("torch", "Tensor._version", WHOLE, lambda: doors.times_written(torch.zeros(2).as_subclass(Uncounted))),
    ("torch", "_C._current_graph_task_id", lambda patch: remove(patch, torch._C, "_current_graph_task_id"),
     doors.in_backward),
    ("torch", "jit.is_tracing", lambda patch: remove(patch, torch.jit, "is_tracing"), doors.without_numbers),
    ("torch", "_C._functorch.peek_interpreter_stack",
     lambda patch: remove(patch, torch._C._functorch, "peek_interpreter_stack"), doors.without_numbers),
    ("torch", "_guards.detect_fake_mode", lambda patch: remove(patch, torch._guards, "detect_fake_mode"),
     doors.without_numbers),
    ("torch", "fx.experimental.proxy_tensor.get_proxy_mode",
     lambda patch: remove(patch, proxy_tensor, "get_proxy_mode"), doors.without_numbers),
    ("torch", "OpOverload._schema", WHOLE, lambda: doors.writes(SimpleNamespace())),
    ("torch", "torch.utils._python_dispatch.TorchDispatchMode",
     lambda patch: remove(patch, torch.utils._python_dispatch, "TorchDispatchMode"),
     lambda: doors.before_operations(print)),
    ("torch", "Module._forward_hooks", WHOLE, lambda: doors.forward_hooks(module_without_hooks())),
    ("torch", "torch._dynamo.OptimizedModule", lambda patch: remove(patch, torch._dynamo, "OptimizedModule"),
     lambda: doors.compiled_from(nn.Linear(2, 2))),
    ("torch", "torch.utils._pytree.tree_map_only", lambda patch: remove(patch, _pytree, "tree_map_only"),
     lambda: doors.map_tensors(Tensor, torch.neg, [])),
    ("torch", "torch.utils.weak.WeakTensorKeyDictionary",
     lambda patch: remove(patch, weak, "WeakTensorKeyDictionary"), doors.weak_tensor_table),
    ("torch", "has_torch_function in multi_head_attention_forward",
     lambda patch: patch.setattr(nn.functional, "multi_head_attention_forward", asks_nothing),
     doors.open_multi_head_attention),
    ("torch", "multi_head_attention_forward.__code__",
     lambda patch: patch.setattr(nn.functional, "multi_head_attention_forward", len), doors.open_multi_head_attention),
    ("accelerate", "utils.memory.should_reduce_batch_size",
     lambda patch: remove(patch, memory, "should_reduce_batch_size"), lambda: doors.is_out_of_memory(ValueError())),
    ("accelerate", "Module._hf_hook", WHOLE, lambda: doors.execution_devices(spread_without_hooks())),
]  # fmt: skip


@pytest.mark.parametrize(("library", "part", "take_away", "use"), GONE, ids=[part for _, part, *_ in GONE])
def test_a_part_that_is_gone_is_named(
    library: str, part: str, take_away: Break, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch)
    with pytest.raises(SinkscopeError) as refused:
        use()
    assert str(refused.value) == (
        f"{library} {version(library)} has no {part}, which sinkscope relies on: try an older {library} or a newer "
        "sinkscope"
    )


def test_every_door_is_tried_here() -> None:
    both = (doors, written_doors)
    defined = {name for each in both for name, value in vars(each).items()
               if getattr(value, "__module__", "") == each.__name__}  # fmt: skip
    used = set(re.findall(r"doors\.(\w+)", Path(__file__).read_text("utf-8")))
    assert {name for name in defined if not name.startswith("_")} - used == {"moved", "part"}


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a module defines, and the names with one leading underscore that it reads from other objects."""
    own, asked = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            made_here = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            (own if made_here else asked).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("sinkscope"):
            asked |= {*(node.module or "").split("."), *(name.name for name in node.names)}
    return own, {name for name in asked if re.match(r"_[a-z]", name)}


@pytest.mark.slow
def test_nothing_else_in_the_package_asks_for_a_private_part() -> None:
    """Two names are allowed: `os._exit` is documented, and transformers tells model authors to read
    `_attn_implementation`."""
    modules = {path: ast.parse(path.read_text("utf-8")) for path in Path(sinkscope.__path__[0]).rglob("*.py")}
    own = set().union(*(private_names(tree)[0] for tree in modules.values()))
    for path, tree in modules.items():
        if path.name not in ("private_doors.py", "generation_doors.py"):
            assert private_names(tree)[1] - own <= {"_exit", "_attn_implementation"}, path

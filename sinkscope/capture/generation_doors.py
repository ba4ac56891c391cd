"""Every undocumented part of transformers' `generate` and its continuous batches that sinkscope uses, each behind one
function, as in `private_doors`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sinkscope.capture.private_doors import part


def cache_methods(name: str) -> dict[type[Any], Callable[..., Any]]:
    """A method of transformers' caches, by the class that has one of its own: `reorder_cache(cache, beam_idx)` or
    `crop(cache, -tokens)`."""
    from transformers import cache_utils

    kinds = [part("transformers", cache_utils, f"cache_utils.{kind}") for kind in ("Cache", "EncoderDecoderCache")]
    return {kind: part("transformers", kind, f"{kind.__name__}.{name}") for kind in kinds}


def set_cache_method(kind: type[Any], name: str, method: Callable[..., Any]) -> None:
    """Gives every cache of this class another method."""
    cache_methods(name)  # raises where the method moved: setting a new one would have no effect
    setattr(kind, name, method)


def growing_layers() -> dict[type[Any], Callable[..., Any]]:
    """The layers of transformers' caches that grow with every pass, each with its method `update(layer, keys, values)`:
    it puts these behind those of the layer and returns all of them. A layer with a sliding window then keeps the newest
    ones alone. Without those whose method somebody has replaced, which may do anything."""
    from transformers import cache_utils

    names = ("DynamicLayer", "DynamicSlidingWindowLayer")
    kinds = [part("transformers", cache_utils, f"cache_utils.{name}") for name in names]
    methods = {kind: part("transformers", kind, f"{kind.__name__}.update") for kind in kinds}
    return {kind: method for kind, method in methods.items() if _file_of(method) == cache_utils.__file__}


def _file_of(function: Any) -> str | None:
    """The file that holds the code of a function; None for what is no plain function."""
    code = getattr(function, "__code__", None)
    return None if code is None else code.co_filename


def set_growing(kind: type[Any], method: Callable[..., Any]) -> None:
    """Gives every layer of this class another method to grow by."""
    kind.update = method


def stopping_test() -> Callable[..., Any]:
    """The method by which `generate` asks after each token which texts have ended: (criteria, ids, scores) -> [B]."""
    from transformers.generation import stopping_criteria

    kind = part("transformers", stopping_criteria, "stopping_criteria.StoppingCriteriaList")
    method: Callable[..., Any] = part("transformers", kind, "StoppingCriteriaList.__call__")
    return method


def set_stopping_test(method: Callable[..., Any]) -> None:
    """Gives every list of criteria another method."""
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    stopping_test()  # raises where the method moved: setting a new one would have no effect
    StoppingCriteriaList.__call__ = method


def end_tokens(criteria: Iterable[Any]) -> list[int]:
    """The tokens that end a text by these criteria; none where no token does."""
    from transformers.generation.stopping_criteria import EosTokenCriteria

    told = [one.eos_token_id.view(-1).tolist() for one in criteria if isinstance(one, EosTokenCriteria)]
    return [token for tokens in told for token in tokens]


def batch_step() -> tuple[type[Any], Callable[..., Any]]:
    """The class that runs continuous batches, and its method for a single pass: (batches, model) -> None."""
    from transformers.generation.continuous_batching import continuous_api

    kind = part("transformers", continuous_api, "continuous_api.ContinuousBatchProcessor")
    return kind, part("transformers", kind, "ContinuousBatchProcessor._generation_step")


def set_batch_step(kind: type[Any], step: Callable[..., Any]) -> None:
    """Gives every continuous batch another method for a pass."""
    batch_step()  # raises where the method moved: setting a new one would have no effect
    kind._generation_step = step


def requests_of(batches: Any) -> list[tuple[str, int, int]]:
    """The requests of the pass that a continuous batch is about to run: the name of each, the tokens that its pages
    hold before the pass, and those of the pass."""
    batch_io = part("transformers", batches, "ContinuousBatchProcessor.inputs_and_outputs")
    if hasattr(batch_io, "io_pairs"):  # two batches at a time, on a GPU
        batch_io = batch_io.io_pairs[batch_io.current_pair].host_io
    shares = part("transformers", batch_io, "ContinuousBatchingIOs.requests_in_batch")
    counts = [part("transformers", share, "FutureRequestState.query_length") for share in shares]
    states = [(share.state, count) for share, count in zip(shares, counts, strict=True)]
    return [(state.request_id, state.position_offset - count, count) for state, count in states]


def replayed(batches: Any) -> bool:
    """Whether a continuous batch runs as a CUDA graph, or compiled: it then pads its inputs."""
    runner = part("transformers", batches, "ContinuousBatchProcessor.model_runner")
    return bool(part("transformers", runner, "ModelRunner.pad_inputs"))


def under_way(batches: Any, name: str) -> bool:
    """Whether a request of a continuous batch is still computed, or waits to be: its pages may be taken from it."""
    scheduler = part("transformers", batches, "ContinuousBatchProcessor.scheduler")
    kinds = ("active_requests", "waiting_requests")
    return any(name in part("transformers", scheduler, f"Scheduler.{kind}") for kind in kinds)

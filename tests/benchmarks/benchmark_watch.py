"""Times a watched model against the same model unwatched: prefills, and a decode of 128 tokens.

    python tests/benchmarks/benchmark_watch.py [--rounds N] [--length T] [--width D] [--layers L] [--model MODEL]
    python tests/benchmarks/benchmark_watch.py --memory unwatched|watched|until [--tokens N]

Without --model it is a Llama with random weights.

The two take turns. The CPU time of all threads is counted, in which a busy machine does not show but threads that wait
do, and the time of the clock, in which it is the other way round; the ratios of the medians are printed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope
from sinkscope.checkpoints import LoadOptions, open_checkpoint


def small(width: int, layers: int) -> Any:
    """A Llama of 8 heads with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2000, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ratio(name: str, work: Callable[[], Any], model: Any, rounds: int, **settings: Any) -> None:
    """Prints watched / unwatched in seconds of CPU and of the clock; building the run is not in it.

    The seconds are medians, and the ratio of the clock's has the range of the pairs behind it.
    """
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(2 * rounds + 2):
        watched = number % 2 == 1
        context: Any = sinkscope.watch(model, **settings) if watched else nullcontext()
        began = time.process_time(), time.perf_counter()
        with torch.no_grad(), context:
            work()
        ended = time.process_time(), time.perf_counter()
        if number > 1:  # the first of each warms up
            times[watched].append((ended[0] - began[0], ended[1] - began[1]))
    (cpu, clock), (seen_cpu, seen_clock) = (
        tuple(statistics.median(pair) for pair in zip(*times[key], strict=True)) for key in (False, True)
    )
    pairs = [after[1] / before[1] for before, after in zip(times[False], times[True], strict=True)]
    print(
        f"{name:30} CPU {cpu:7.3f} s {seen_cpu:7.3f} s x {seen_cpu / cpu:.2f}"
        f"   clock {clock:7.3f} s {seen_clock:7.3f} s x {seen_clock / clock:.2f} ({min(pairs):.2f}-{max(pairs):.2f})",
        flush=True,
    )


def memory(how: str, tokens: int) -> None:
    """Prints by how many MiB a generation of so many tokens makes the process larger than a short one did.

    `how`: unwatched, watched, or until, a watch that ends a sequence at 256 positions.
    """
    torch.set_num_threads(1)
    model, ids = small(512, 6), torch.randint(3, 1999, (1, 64), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"until": 256} if how == "until" else {}
    sizes = []
    for new in (40, tokens):
        context: Any = nullcontext() if how == "unwatched" else sinkscope.watch(model, **settings)
        with torch.no_grad(), context as seen:
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        if seen is not None:
            seen.run()
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"{how}, {tokens} tokens: {sizes[1] - sizes[0]:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--model", help="a name that `sinkscope scan` reads, in place of the small Llama")
    parser.add_argument("--memory", choices=["unwatched", "watched", "until"], help="measure memory, not time")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens that --memory writes")
    given = parser.parse_args()
    if given.memory:
        memory(given.memory, given.tokens)
        return
    if given.model is None:
        model = small(given.width, given.layers)
    else:
        model = open_checkpoint(given.model, LoadOptions(head=True)).model
    tokens = model.config.get_text_config().vocab_size
    ids = torch.randint(tokens, (1, given.length), generator=torch.Generator().manual_seed(0))

    def decode(tokens: int) -> None:
        model.generate(ids[:, :tokens], max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0)

    def passes() -> None:
        for _ in range(8):
            model(ids, use_cache=False)

    print("seconds unwatched and watched, and their ratio")
    ratio(f"prefill of {given.length} tokens", lambda: model(ids, use_cache=False), model, given.rounds)
    ratio("8 prefills", passes, model, given.rounds)
    for tokens in (32, given.length):
        ratio(f"decode of 128 tokens after {tokens}", partial(decode, tokens), model, given.rounds)
    ratio("8 prefills, every=8", passes, model, given.rounds, every=8)
    ratio("8 prefills, limit=1", passes, model, given.rounds, limit=1)


if __name__ == "__main__":
    main()

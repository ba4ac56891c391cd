"""kvpress answers a question over a cache of which a press keeps half: press.py FOLDER knorm|streaming."""

import sys
from typing import Any

from kvpress import KnormPress, KVPressTextGenerationPipeline, StreamingLLMPress
from transformers import AutoModelForCausalLM, AutoTokenizer

PRESSES = {"knorm": KnormPress, "streaming": StreamingLLMPress}
TEXT = (
    "Anna has three brothers. The eldest, Paul, lives in Rome and builds boats. The second, Tom, lives in Oslo and "
    "teaches music. The youngest, Max, still goes to school and wants to become a baker."
)
QUESTION = "\nWhere does Tom live? Tom lives in"


def fitted(press: Any) -> Any:
    """kvpress 0.5 is written for transformers below 5.3: its hook is given the two keywords that newer ones lack."""
    own = press.forward_hook

    def hook(module: Any, args: Any, given: dict[str, Any], output: Any) -> Any:
        cache = given.get("cache", given.get("past_key_values"))
        return own(
            module, args, {**given, "past_key_values": cache, "cache_position": given["position_ids"][0]}, output
        )

    press.forward_hook = hook
    return press


def load(folder: str, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def work(model: Any, name: str) -> str:
    """The answer."""
    press = fitted(PRESSES[name](0.5))
    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(model.name_or_path))
    found: str = pipe(TEXT, question=QUESTION, press=press, max_new_tokens=12)["answer"]
    return found


if __name__ == "__main__":
    print(work(load(*sys.argv[1:]), sys.argv[2]))

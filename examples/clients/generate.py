"""A language model of transformers writes on, over its cache of keys and values: generate.py FOLDER."""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "The three largest cities of France are"


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def work(model: Any) -> torch.Tensor:
    """The token ids of prompt and answer, (1, tokens)."""
    given = AutoTokenizer.from_pretrained(model.name_or_path)(PROMPT, return_tensors="pt")
    written: torch.Tensor = model.generate(**given, max_new_tokens=24, do_sample=False)
    return written


if __name__ == "__main__":
    writer = load(sys.argv[1])
    print(AutoTokenizer.from_pretrained(writer.name_or_path).decode(work(writer)[0]))

"""How programs that run other libraries are typed and loaded: those of examples/clients, and two more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import client_maps
import torch
from client_maps import Maps

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Client:
    """A program that runs another library.

    Attributes:
        name: what the page calls it.
        library: the distribution that it runs.
        program: what stands behind `python` or the two dashes of `sinkscope watch`. GEMMA and MINILM are folders.
        own: the library's own maps of what it does, from `program_of` and the arguments.
        maps: how the library gives these maps, in words.
        domain: the condition that the maps are of; None where the run has one.
        watches: whether the program itself enters `sinkscope.watch`, so that it is run by `python`.
        every: which batches such a program watches.
        trained: the attribute of what `load` returns that is the model; empty where this is the model.
    """

    name: str
    library: str
    program: str
    own: Callable[..., Maps]
    maps: str
    domain: str | None = None
    watches: bool = False
    every: int = 1
    trained: str = ""

    @property
    def arguments(self) -> list[str]:
        """What the program's `load` gets."""
        if self.program.startswith("-m"):
            return ["$GEMMA"]
        return self.program.split()[1:]

    @property
    def version(self) -> str | None:
        """The library's version; None where it is not installed."""
        try:
            return version(self.library)
        except PackageNotFoundError:
            return None

    def typed(self, key: str) -> str:
        """The line that a user types."""
        if self.watches:
            return f"python {self.program}"
        texts = next((f" --tokenizer ${name}" for name in FOLDERS if f"${name}" in self.program), "")
        return f"sinkscope watch --out runs/{key}{texts} -- {self.program}"


LM_EVAL = (
    "-m lm_eval run --model hf --model_args pretrained=$GEMMA,dtype=float32 --tasks capitals "
    "--include_path examples/clients --batch_size 1 --device cpu"
)
CLIENTS = {
    "lm-eval": Client("lm-eval", "lm_eval", LM_EVAL, client_maps.of_lm_eval, "transformers' eager attention"),
    "generate": Client(
        "transformers, generate", "transformers", "examples/clients/generate.py $GEMMA", client_maps.of_generate,
        "transformers' eager attention at each step",
    ),
    "knorm": Client(
        "kvpress, KnormPress", "kvpress", "examples/clients/press.py $GEMMA knorm", client_maps.of_press,
        "transformers' eager attention at each step, under the press",
    ),
    "streaming": Client(
        "kvpress, StreamingLLMPress", "kvpress", "examples/clients/press.py $GEMMA streaming", client_maps.of_press,
        "transformers' eager attention at each step, under the press",
    ),
    "lens": Client(
        "TransformerLens", "transformer-lens", "examples/clients/lens.py $GEMMA", client_maps.of_lens,
        "`run_with_cache`",
    ),
    "timm": Client(
        "timm", "timm", "examples/clients/vit_registers.py", client_maps.of_vit, "its unfused attention"
    ),
    "diffusers": Client(
        "diffusers", "diffusers", "examples/clients/dit_steps.py", client_maps.of_dit,
        "`get_attention_scores` of its plain processor", "t=0", True,
    ),
    "sentences": Client(
        "sentence-transformers", "sentence-transformers", "examples/clients/sentences.py $MINILM",
        client_maps.of_sentences, "transformers' eager attention, one text at a time",
    ),
    "trl": Client(
        "TRL, with SinkCallback", "trl", "examples/clients/finetune.py $GEMMA", client_maps.of_finetune,
        "transformers' eager attention of a copy at each step", trained="model",
    ),
    "x-transformers": Client(
        "x-transformers", "x-transformers", "examples/clients/memory_keys.py", client_maps.of_memory_keys,
        "its intermediates of one pass over the whole text",
    ),
    "nano-gpt": Client(
        "a GPT in plain torch", "torch", "examples/nano_gpt.py", client_maps.of_nano,
        "its attention with the softmax written out, at step 40", "step 40", True, 20,
    ),
}  # fmt: skip


FOLDERS = {"GEMMA": "gemma-3-270m", "MINILM": "minilm"}
"""The examples whose folders these names stand for."""


def folders(words: str) -> dict[str, str]:
    """The folders of the checkpoints that are named in the words. Raises SinkscopeError where one is not installed."""
    from sinkscope.checkpoints.examples import example_folder

    return {name: str(example_folder(example)) for name, example in FOLDERS.items() if f"${name}" in words}


def filled(words: str, places: dict[str, str]) -> str:
    """The words with folders in the place of their names."""
    for name, folder in places.items():
        words = words.replace(f"${name}", folder)
    return words


def program_of(client: Client) -> ModuleType | Any:
    """What has the client's `load` and `work`: the module of its file, or a stand-in for what has none."""
    if client.program.startswith("-m"):
        return SimpleNamespace(load=_load_causal, work=_evaluate)
    file = ROOT / client.program.split()[0]
    sys.path.insert(0, str(file.parent))
    module = import_module(file.stem)
    if not hasattr(module, "load"):
        vars(module).update(load=lambda: _seeded(module.GPT), work=module.train)
    return module


def _seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def _load_causal(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def _evaluate(model: Any) -> torch.Tensor:
    """lm-eval on the task of examples/clients: the logarithms of the answers' probabilities."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=model, tokenizer=model.name_or_path, batch_size=1)
    manager = TaskManager(include_path=str(EXAMPLES / "clients"))
    found = simple_evaluate(wrapped, tasks=["capitals"], task_manager=manager, bootstrap_iters=0)
    return torch.tensor([
        float(answer[0][0]) for each in found["samples"]["capitals"] for answer in each["resps"]
    ])  # fmt: skip

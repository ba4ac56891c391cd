"""Loads a checkpoint's tokenizer, says why that or the model cannot be loaded, and which tokens tell it a language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.checkpoints.examples import example_folder
from sinkscope.checkpoints.gguf_files import gguf_problem
from sinkscope.checkpoints.private_doors import asks_for_own_code, is_unknown_type, language_codes
from sinkscope.checkpoints.sources import Source, path_of, weight_paths
from sinkscope.checkpoints.weight_files import damaged
from sinkscope.errors import SinkscopeError, all_lines, first_line, shorten
from sinkscope.inputs.rules import NoTokenizer

if TYPE_CHECKING:
    from sinkscope.checkpoints.checkpoint import Checkpoint


OWN_CODE = "it carries its own Python code"


def load_tokenizer(source: Source, trust_remote_code: bool) -> tuple[Any, str | None]:
    """Returns (tokenizer, None) or (None, reason): token files can be scanned without a tokenizer."""
    from transformers import AutoTokenizer

    if source.gguf and (problem := gguf_problem()):
        return None, problem
    extra = source.arguments(trust_remote_code)
    if source.gguf:
        extra["gguf_file"] = source.gguf
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **extra)
    except Exception as error:  # absent, damaged, of an unknown class, missing package: the caller says which
        if asks_for_own_code(error):
            return None, f"{OWN_CODE}: pass --trust-remote-code if you trust it"
        return None, _found_in_files(source) or first_line(error)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Some families load an empty tokenizer where its files are missing, and all text would become [UNK].
        return None, "no vocabulary files"
    return tokenizer, None


def named_tokenizer(name: str) -> Any:
    """The tokenizer of example:NAME, a folder or a hub id; weights are not looked at. Raises SinkscopeError where there
    is none that needs no code of its own, and where neither the hub nor its cache has the id."""
    path = path_of(name)
    if name.startswith("example:"):
        path = example_folder(name.removeprefix("example:"))
    elif not path.exists():
        from sinkscope.checkpoints.hub import config_on_hub

        config_on_hub(name, None)  # says in one line what is wrong, where transformers tries for a minute
    tokenizer, problem = load_tokenizer(Source(name, str(path) if path.exists() else name), False)
    if tokenizer is not None:
        return tokenizer
    if problem is not None and problem.startswith(OWN_CODE):
        problem = f"{OWN_CODE}, which is not run here"
    raise SinkscopeError(f"{name} gives no tokenizer: {problem}")


def check_tokenizer(tokenizer: Any) -> None:
    """Raises SinkscopeError for what is given as a tokenizer and is none."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "convert_ids_to_tokens")):
        raise SinkscopeError(
            f"tokenizer={tokenizer!r}: a tokenizer of transformers is needed (AutoTokenizer.from_pretrained makes one)"
        )


FILES = ("tokenizer*.json", "vocab*.json", "special_tokens_map.json", "added_tokens.json")
OTHERS = ("*.model", "*.tiktoken", "vocab.txt", "merges.txt", "*.py")
"""Files of a tokenizer, those that are JSON and others."""


def _found_in_files(source: Source) -> str:
    """What is wrong with the files of a local tokenizer: there are none, or one is no JSON; "" otherwise."""
    folder = Path(source.location)
    if source.gguf or not folder.is_dir():
        return ""
    paths = [path for pattern in FILES for path in sorted(folder.glob(pattern))]
    if not paths and not any(path for pattern in OTHERS for path in folder.glob(pattern)):
        return "no vocabulary files"
    for path in paths:
        try:
            json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return str(damaged(path, error))
    return ""


@contextmanager
def tokenizer_needed(checkpoint: Checkpoint) -> Iterator[None]:
    """Around the reading of data that may be text: says why the checkpoint's tokenizer cannot be used."""
    try:
        yield
    except NoTokenizer:
        if checkpoint.tokenizer_error is None:
            raise
        raise SinkscopeError(
            f"{checkpoint.name} has no usable tokenizer ({checkpoint.tokenizer_error}): text cannot be read; "
            "give token ids (.jsonl with `input_ids`) or --data random"
        ) from None


def why_not_loaded(source: Source, error: Exception | SystemExit) -> str:
    """One line for any defect of a checkpoint, with what to do where that is known."""
    if isinstance(error, SystemExit):
        return f"cannot load {source.name}: its own Python code ends the program (exit code {error.code})"
    if unreadable := _unreadable_pickles(source):
        return (
            f"{source.name}: its pickled weights ({', '.join(unreadable)}) are damaged or hold more than tensors; "
            "download them again, or convert them to safetensors"
        )
    if asks_for_own_code(error):
        return f"{source.name} carries its own Python code: pass --trust-remote-code if you trust it"
    if isinstance(error, ImportError):
        return f"{source.name} needs a package that is not installed: {first_line(error)}"
    if is_unknown_type(error):
        return f"{source.name} is of a model type this transformers does not know: {first_line(error)}"
    if isinstance(error, KeyError) and error.args:
        return (
            f"cannot load {source.name}: transformers finds no {shorten(str(error))}; a setting of its config.json is "
            "missing, or names what transformers does not know"
        )
    return f"cannot load {source.name}: {all_lines(error)}"


def _unreadable_pickles(source: Source) -> list[str]:
    """The files of pickled weights that cannot be read, or hold more than tensors by name. transformers passes on what
    the pickle module, a zip reader or a dictionary says of such a file: a number, or nothing."""
    paths = weight_paths(source) if source.pickled else []
    return [path.name for path in paths if path.suffix == ".bin" and not _holds_tensors(path)]


def _holds_tensors(path: Path) -> bool:
    import torch

    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # whatever it says
        return False
    return isinstance(content, dict) and all(isinstance(value, torch.Tensor) for value in content.values())


def language_and_task(origin: dict[str, Any]) -> dict[str, int]:
    """The tokens, with their ids, that tell a multilingual Whisper its language and task; empty for other models.

    They are what generation_config.json asks for, or else English and transcription.
    """
    from transformers import GenerationConfig

    options = dict(origin)
    try:
        config = GenerationConfig.from_pretrained(options.pop("pretrained_model_name_or_path", None), **options)
    except (OSError, ValueError, TypeError):  # the checkpoint has no such file
        return {}
    languages, tasks = getattr(config, "lang_to_id", None), getattr(config, "task_to_id", None)
    if not isinstance(languages, dict) or not isinstance(tasks, dict):
        return {}
    language = str(getattr(config, "language", None) or "en").lower().strip("<|>")
    language = f"<|{language_codes().get(language, language)}|>"
    task = str(getattr(config, "task", None) or "transcribe")
    if not isinstance(languages.get(language), int) or not isinstance(tasks.get(task), int):
        raise SinkscopeError(f"--audio: generation_config.json has no id for language {language} or task {task}")
    return {language: languages[language], f"<|{task}|>": tasks[task]}

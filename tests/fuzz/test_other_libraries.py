"""Other libraries fail in ways of their own: each command says so in one line, without an exception's class.

A fault is an exception, drawn at random, that a function of another library raises from one of its calls on.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import peft
import pyarrow.parquet
import pytest
import safetensors
import safetensors.torch
import transformers
from random_share import share_of
from tiers import thinned
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.engine import shards


class OfItsOwn(Exception):
    """A class that no handler can know."""


ERRORS: tuple[Callable[[], Exception], ...] = (
    ValueError,
    lambda: KeyError("lm_head"),
    OSError,
    lambda: OSError(5, "Input/output error", "somewhere"),
    lambda: RuntimeError("first line\nsecond line\nthird line"),
    lambda: AttributeError("'NoneType' has no attribute 'keys'"),
    lambda: TypeError("unhashable type: 'list'"),
    lambda: IndexError("list index out of range"),
    AssertionError,
    lambda: OfItsOwn("of its own"),
    OfItsOwn,
)


@dataclass(frozen=True)
class Door:
    """A function of another library. `words`: the command that calls it, RUN and MODEL being a run and a checkpoint."""

    owner: Any
    name: str
    words: tuple[str, ...]


BASE = transformers.PreTrainedTokenizerBase
SCAN = ("scan", "MODEL", "--num-sequences", "2", "--seq-len", "16", "--batch-size", "1", "--no-self-check", "--quiet",
        "--out", "OUT")  # fmt: skip
DOORS = [
    Door(transformers.AutoConfig, "from_pretrained", SCAN),
    Door(transformers.PreTrainedModel, "from_pretrained", SCAN),
    Door(transformers.AutoTokenizer, "from_pretrained", SCAN),
    Door(BASE, "__call__", SCAN),
    Door(transformers.PreTrainedTokenizerFast, "convert_ids_to_tokens", SCAN),
    Door(BASE, "apply_chat_template", (*SCAN, "--data", "CHATS")),
    Door(safetensors, "safe_open", SCAN),
    Door(shards, "save_file", SCAN),
    Door(pyarrow.parquet, "ParquetFile", (*SCAN, "--data", "ROWS")),
    Door(pd.DataFrame, "to_parquet", SCAN),
    Door(safetensors.torch, "load_file", (*SCAN, "--adapter", "ADAPTER")),
    Door(peft, "PeftModel", (*SCAN, "--adapter", "ADAPTER")),
    Door(peft, "set_peft_model_state_dict", (*SCAN, "--adapter", "ADAPTER")),
    Door(pd, "read_parquet", ("report", "RUN", "-o", "OUT")),
    Door(pd, "read_csv", ("report", "RUN", "-o", "OUT")),
    Door(jinja2.Environment, "get_template", ("report", "RUN", "-o", "OUT")),
    Door(jinja2.Template, "render", ("report", "RUN", "-o", "OUT")),
    Door(pd.DataFrame, "to_parquet", ("export", "RUN", "--format", "parquet", "-o", "OUT")),
    Door(pd.DataFrame, "to_parquet", ("export", "RUN", "--format", "hf-dataset", "-o", "OUT")),
]  # fmt: skip

CASES = list(itertools.product(range(len(DOORS)), range(len(ERRORS))))
random.Random(7).shuffle(CASES)
FAST = 10


@pytest.fixture(scope="module")
def world(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The places that commands name, by their placeholders."""
    folder = tmp_path_factory.mktemp("world")
    model = Path(shutil.copytree(tiny_folder, folder / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    told = "The ferry bell rang, and the old man lifted his hat to nobody."
    turns = [{"role": "user", "content": "What rang twice?"}, {"role": "assistant", "content": told}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 4, "utf-8")
    pd.DataFrame({"text": ["The ferry bell rang twice before the rope was loose. " * 4] * 4}).to_parquet(
        folder / "rows.parquet"
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    with warnings.catch_warnings(action="ignore"):  # of properties that peft asks transformers for
        peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    places = {"MODEL": str(model), "RUN": str(folder / "run"), "CHATS": f"{folder / 'chats.jsonl'}#messages",
              "ROWS": str(folder / "rows.parquet"), "ADAPTER": str(folder / "adapter")}  # fmt: skip
    done = CliRunner().invoke(app, [places.get(word, word) if word != "OUT" else places["RUN"] for word in SCAN])
    assert done.exit_code == 0, done.output
    return places


def fault(
    door: Door, make: Callable[[], Exception], turn: int, world: dict[str, str], out: Path, patch: pytest.MonkeyPatch
) -> None:
    """Lets calls of the door fail from the `turn`-th on. Holds the command to its contract where there are so many."""
    own, calls = vars(door.owner)[door.name], itertools.count()
    bound = isinstance(own, classmethod)
    call = own.__func__ if bound else own
    raised = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= turn:
            raised.append(make())
            raise raised[-1]
        return call(*args, **kwargs)

    words = [str(out) if word == "OUT" else world.get(word, word) for word in door.words]
    with patch.context() as patched:
        patched.setattr(door.owner, door.name, classmethod(failing) if bound else failing)
        done = CliRunner().invoke(app, words)
    shown = f"{door.name} {make()!r}: {done.stderr}"
    if not raised:
        assert (turn > 0, done.exit_code) == (True, 0), shown
        return
    assert (done.exit_code, done.stdout) == (2, ""), shown
    [line] = done.stderr.splitlines()
    assert line.startswith("sinkscope: error: "), shown
    assert len(line) > len("sinkscope: error: ") + 10, shown
    assert "unexpected" not in line, shown
    assert type(raised[0]).__name__ not in line, shown
    left = [path for path in out.rglob("*") if "shards" not in path.parts] if out.is_dir() else [out] * out.exists()
    assert left == [], shown


@pytest.mark.parametrize("case", CASES[:FAST], ids=str)
def test_a_first_call_that_fails_is_one_line(
    case: tuple[int, int], world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, error = case
    fault(DOORS[door], ERRORS[error], 0, world, tmp_path / "out", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", thinned(CASES[FAST:]), ids=str)
def test_any_first_call_that_fails_is_one_line(
    case: tuple[int, int], world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, error = case
    fault(DOORS[door], ERRORS[error], 0, world, tmp_path / "out", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(share_of(60)))
def test_a_later_call_that_fails_is_one_line(
    seed: int, world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    fault(draw.choice(DOORS), draw.choice(ERRORS), draw.randint(1, 4), world, tmp_path / "out", monkeypatch)

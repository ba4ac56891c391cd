"""What most tests share: a tiny checkpoint on disk, and `sinkscope scan` called in process.

torch and transformers are imported where a test uses them: the process that deals the tests out to workers reads this
file, too, and runs none.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: each with a thread a core would wait for the other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import typer.testing
from hypothesis import settings
from random_share import share_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

command_of = functools.cache(typer.main.get_command)
"""The parsers of a typer application. Built anew for each call, as typer's test runner does, they take 0.1 s."""
typer.testing._get_command = command_of

gc.disable()  # until all is collected: what is imported until then stays, and the search for garbage in it took 3 s
atexit.register(gc.unfreeze)  # libraries that look for leaks as Python ends find none

settings.register_profile("fast", max_examples=25, deadline=None)
settings.register_profile("full", max_examples=share_of(250), deadline=None)
settings.load_profile("fast")  # unless --hypothesis-profile asks for the other

COUNTED = "family counted"
"""The property of a test's report that says what became of a model type: (list it stands in, fate)."""

POSITIONS, VOCABULARY = 512, 500
SHORT = ("--seq-len", "32", "--num-sequences", "2")
TABLES = ("heads.csv", "layers.csv", "length_curve.csv", "tokens.csv")
TABLES += ("positions.parquet", "sequences.parquet", "sinks.parquet")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def corpus_texts(name: str) -> list[str]:
    """The documents of a built-in corpus, in order."""
    folder = files("sinkscope") / "data" / name
    return [entry.read_text("utf-8") for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)]


@functools.cache
def trained_tokenizer(bos: str) -> str:
    """A tokenizer as JSON: training it takes longer than many a test."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[bos, "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_texts("prose"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, 0)])
    return str(tokenizer.to_str())


def make_tokenizer(bos: str = "<s>") -> PreTrainedTokenizerFast:
    """Byte-level BPE over the built-in prose; like Llama's, it puts BOS first by itself."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(trained_tokenizer(bos))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>", pad_token="<pad>")


def make_model(**overrides: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**SIZES, **overrides})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def pytest_collection_finish() -> None:
    """Leaves what libraries and test files have made out of garbage collections, which take half a second with it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def without_waiting_for_the_disk() -> None:
    """A run folder waits for the disk fifteen times, for a machine that loses power; no test takes it away."""
    os.fsync = lambda handle: None


@pytest.fixture(scope="session", autouse=True)
def without_progress_bars() -> None:
    """transformers' bars over the weights that it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """A 2-layer random Llama with its head, in eval mode. Shared: leave it as it is."""
    return make_model()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any, tokenizer: Any) -> Path:
    """`tiny_model` and its tokenizer as save_pretrained writes them. Shared: write only into a copy (`copied`)."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tiny_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_folder` for the test to damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copied"))


@dataclass(frozen=True)
class Outcome:
    """What a command did: exit code, both streams, and the run folder it was told to write."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def warnings(self) -> list[str]:
        prefix = "sinkscope: warning: "
        return [line.removeprefix(prefix) for line in self.stderr.splitlines() if line.startswith(prefix)]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text("utf-8"))


@pytest.fixture
def in_time() -> Iterator[None]:
    """Ends a test that waits, as for the writer of a pipe."""

    def late(*_: Any) -> None:
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


Scan = Callable[..., Outcome]
Refused = Callable[..., str]


@pytest.fixture
def scan_cli(tmp_path: Path) -> Scan:
    """`sinkscope scan MODEL ARGUMENTS --out tmp/results/NAME`, short sequences unless told otherwise."""

    def scan(
        model: object, *args: object, name: str = "run", out: object = None, stdin: str | None = None,
        seq_len: bool = True,
    ) -> Outcome:  # fmt: skip
        from sinkscope.cli import app

        folder = Path(str(out)) if out is not None else tmp_path / "results" / name
        if out is None:
            folder.parent.mkdir(exist_ok=True)
        words = [str(word) for word in args]
        for option, value in zip(SHORT[::2], SHORT[1::2], strict=True):
            words += [] if option in words or (option == "--seq-len" and not seq_len) else [option, value]
        result = typer.testing.CliRunner().invoke(app, ["scan", str(model), *words, "--out", str(folder)], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr, folder)

    return scan


@pytest.fixture
def refused(scan_cli: Scan, tmp_path: Path) -> Refused:
    """Runs a scan that must be refused: one foreseen line on stderr, exit 2, nothing left behind. Returns the line.

    `shards`: it fails only when all is measured, and keeps that, and nothing else, for --resume.
    """

    def run(model: object, *args: object, shards: bool = False, **kwargs: Any) -> str:
        results = tmp_path / "results"
        before = sorted(path.name for path in results.iterdir()) if results.exists() else []
        outcome = scan_cli(model, *args, **kwargs)
        assert outcome.code == 2, outcome
        assert outcome.stdout == ""
        lines = outcome.stderr.splitlines()
        assert len(lines) == 1, outcome.stderr
        assert lines[0].startswith("sinkscope: error: ")
        assert "unexpected" not in lines[0], lines[0]
        assert len(lines[0]) < 500, "one line, but one nobody reads"
        if shards:
            assert "--resume" in lines[0]
            assert any((outcome.folder / "shards").iterdir())
        elif results.exists():
            assert sorted(path.name for path in results.iterdir()) == before
        return lines[0].removeprefix("sinkscope: error: ")

    return run


@pytest.fixture
def patch_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[torch.Tensor], None]], None]:
    """Calls a function with the token ids before every forward of a Llama; what it raises comes out of the model."""
    from transformers import LlamaModel

    original = LlamaModel.forward

    def patch(before: Callable[[torch.Tensor], None]) -> None:
        @functools.wraps(original)
        def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
            before(input_ids)
            return original(self, input_ids=input_ids, **kwargs)

        monkeypatch.setattr(LlamaModel, "forward", forward)

    return patch


TOLD = "told"
"""The property under which `tell` records a line."""
Tell = Callable[[str], None]


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """Prints a line of counts at the end of the run, from whatever worker it comes."""
    return lambda line: record_property(TOLD, line)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What tests have counted; then the model types of each list that the full tier has read (docs/models.md)."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    told = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == TOLD]
    if told:
        terminalreporter.section("counts")
        for line in told:
            terminalreporter.line(line)
    if config.option.markexpr:  # only a part of each list was run
        return
    fates: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            if name == COUNTED:
                fates.setdefault(value[0], Counter())[value[1]] += 1
    if fates:
        import transformers

        terminalreporter.section(f"model types of transformers {transformers.__version__}")
    for name, counts in fates.items():
        types, read = counts.total(), counts.pop("read", 0)
        softmax = types - counts["no softmax attention"]
        others = "".join(f", {count} {fate}" for fate, count in sorted(counts.items()) if count)
        terminalreporter.line(f"{name}: {read} read of {softmax} with softmax attention, {types} types{others}")

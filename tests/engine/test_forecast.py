"""The dry run: plans, parameters, operations and bytes on shapes against closed forms and against real models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from families import tiny_model
from ggufs import write_gguf
from hub import files_of, found
from models import FAMILIES, random_ids, tiny
from tiers import slow_but
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModel,
    DeepseekV3Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    ViTConfig,
    WhisperConfig,
)
from typer.testing import CliRunner

import sinkscope
from sinkscope import SinkscopeError, dry_run, dry_run_arms
from sinkscope.capture import plan
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.interface import shadowed
from sinkscope.capture.kernels.attend import attend_in_blocks
from sinkscope.capture.shapes import Shapes, shape_of
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.outline import outline_of
from sinkscope.cli import app
from sinkscope.engine.batch_size import chosen_batch
from sinkscope.engine.forecast.build import looked, token_ids
from sinkscope.engine.forecast.costs import (
    MACHINES,
    UTILISATION,
    attention_flops,
    counted,
    measured_rate,
    sums_bytes,
    watching_bytes,
)
from sinkscope.engine.record import BatchRecord
from sinkscope.experiments.arms.experiment import arms
from sinkscope.present.terminal.forecast import duration, render_forecast
from sinkscope.present.text import WIDTH
from sinkscope.runs.forecast import CONFIGURATION, DRY, Forecast

CPU = torch.device("cpu")
VOCABULARY, WIDE, INNER, LAYERS, HEADS, GROUPS, HEAD = 97, 64, 96, 3, 4, 2, 16
"""The sizes of `tiny("llama")`."""
MATRICES = 2 * WIDE * HEADS * HEAD + 2 * WIDE * GROUPS * HEAD + 3 * WIDE * INNER
"""Numbers in the matrices of one of its layers."""
ON = {"machine": "h100"}
"""Nothing is measured then."""


def folder(path: Path, config: Any) -> str:
    """A folder with a configuration and nothing else."""
    config.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt2", "gemma3", "bert"))
def test_the_plan_without_numbers_is_that_of_the_model(family: str) -> None:
    model = tiny(family)
    real = plan(model, lambda: Forward(model)(token_ids(1, 16)))
    seen = looked(outline_of(model, False).model, token_ids, []).plan
    assert seen is not None
    assert (seen.sites, seen.unread, seen.positions) == (real.sites, real.unread, real.positions)


def test_parameters_and_weights_in_closed_form() -> None:
    model = tiny("llama")
    told = dry_run(model, data=random_ids(2, 32), **ON)
    expected = VOCABULARY * WIDE + LAYERS * (MATRICES + 2 * WIDE) + WIDE
    assert told.parameters == expected == sum(each.numel() for each in model.parameters())
    assert told.memory.weights == 4 * expected
    assert dry_run(model.to(torch.bfloat16), data=random_ids(2, 32), **ON).memory.weights == 2 * expected


def by_rotary(model: Any, length: int) -> int:
    """Operations by which some releases of transformers multiply positions with frequencies."""
    with FlopCounterMode(display=False) as counter:
        model.rotary_emb(torch.zeros(1, length, 1).to(model.device), torch.arange(length).to(model.device)[None])
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("sequences", "length"), [(1, 16), (3, 40)])
def test_operations_in_closed_form_and_as_torch_counts_them(sequences: int, length: int) -> None:
    model = tiny("llama")
    outline = outline_of(model, False).model
    costs = counted(outline, lambda: Forward(outline)(token_ids(sequences, length)), sequences, length, CPU)
    tokens = sequences * length
    assert costs.linear - by_rotary(model, length) == 2 * tokens * LAYERS * MATRICES
    assert costs.attention == 2 * tokens * length * LAYERS * HEADS * 2 * HEAD
    with FlopCounterMode(display=False) as counter, torch.no_grad(), shadowed(model, lambda _, call: shape_of(call)):
        Forward(model)(token_ids(sequences, length))
    assert costs.linear == counter.get_total_flops()
    doubled = costs.flops(2 * sequences, 2 * length)
    assert doubled == 4 * costs.linear + 8 * costs.attention


def test_experts_count_for_the_tokens_that_reach_them() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=50, num_local_experts=8, num_experts_per_tok=2)
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32).eval()
    costs = counted(model, lambda: Forward(model)(token_ids(2, 24)), 2, 24, CPU)
    each = 4 * 32 * 32 + 32 * 8 + 2 * 3 * 32 * 48
    assert costs.linear - by_rotary(model, 24) == 2 * 48 * 2 * each


def peak_of(run: Any, path: Path) -> int:
    """Most bytes that torch had allocated at once during `run`, above what it held before."""
    # torch 2.11 warns of a second cycle, which is none of ours, unless it is to keep the events of the first
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        run()
    watched.export_chrome_trace(str(path))
    events = [each["args"] for each in json.loads(path.read_text())["traceEvents"] if each["name"] == "[memory]"]
    held = most = 0
    for each in events:
        held += each["Bytes"]
        most = max(most, held)
    return most


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma3", "bert"], "gpt2", "gemma3"))
def test_the_peak_of_a_pass_is_what_torch_allocates(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    outline = outline_of(model, False).model
    costs = counted(outline, lambda: Forward(outline)(token_ids(3, 100)), 3, 100, CPU)
    ids = token_ids(3, 100).contiguous()

    def run() -> None:
        with torch.no_grad(), shadowed(model, lambda _, call: shape_of(call)):
            Forward(model)(ids)

    run()
    assert costs.activations == pytest.approx(peak_of(run, tmp_path / "trace.json"), rel=0.03)


def call_of(batch: int, heads: int, queries: int, keys: int) -> AttentionCall:
    shape = (batch, heads, queries, 8)
    query, key = torch.randn(shape), torch.randn(batch, heads, keys, 8)
    return AttentionCall(query, key, key, None, queries == keys, scaling=1.0)


@pytest.mark.parametrize("changed", [{}, {"sinks": torch.zeros(1, 3, 1, 1)}, {"score": "relu"}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(80, 80), (20, 20), (70, 90)])
def test_the_sums_take_the_bytes_that_are_told(queries: int, keys: int, changed: dict[str, Any]) -> None:
    """A learned sink, or a score that is no softmax, leaves a total of each row to keep."""
    call = replace(call_of(2, 3, queries, keys), **changed)
    _, sums = attend_in_blocks(call)
    shared = ("visible", "sees_first", "sees_few")
    real = {name: each for name, each in vars(sums).items() if isinstance(each, Tensor) and name not in shared}
    held = sum(each.nbytes for each in real.values())
    assert held == sums_bytes(2, 3, queries, keys, bool(changed))
    assert watching_bytes(call, CPU) - held == watching_bytes(call_of(2, 3, queries, keys), CPU) - sums_bytes(
        2, 3, queries, keys, False
    )
    assert attention_flops(call) == 2 * 2 * 3 * queries * keys * 16


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 100])
def test_what_is_kept_takes_the_bytes_that_are_told(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted_bytes = []
    own = BatchRecord.values

    def values(record: BatchRecord) -> Any:
        events = {each.name for each in record._quantities.quantities if each.dims[0] in ("event", "element")}
        parts = [part for _, kept in record._done.values() for all_parts in kept.values() for part in all_parts]
        kept = sum(each.nbytes for part in parts for name, each in part.values.items() if name not in events)
        counted_bytes.append(kept + sum(total._sum.nbytes for total in record._totals.values()))
        return own(record)

    monkeypatch.setattr(BatchRecord, "values", values)
    model, ids = tiny("llama"), random_ids(5, length)
    sinkscope.scan(model, data=ids, batch_size=2, self_check=False)
    assert counted_bytes == [dry_run(model, data=ids, **ON).memory.kept]


def totals(told: Forecast) -> tuple[int, int]:
    """Passes, and tokens, in all."""
    return sum(each.passes for each in told.passes), sum(each.tokens for each in told.passes)


def counting(model: nn.Module) -> list[int]:
    """Gets the number of tokens of each forward pass of the model from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(("count", "size"), slow_but([(7, 3), (5, None), (1, None)], (7, 3)))
def test_a_scan_makes_the_passes_that_are_told(count: int, size: int | None) -> None:
    model, ids = tiny("llama"), random_ids(count, 48)
    told = dry_run(model, data=ids, batch_size=size, **ON)
    seen = counting(model)
    sinkscope.scan(model, data=ids, batch_size=size)
    assert (len(seen), sum(seen)) == totals(told)
    assert [each.what for each in told.passes] == ["find attention", "self-check", "self-check, outputs", "scan"]


def test_what_later_tokens_change_is_passed_once_more() -> None:
    """The beginning of an encoder's sequence has other outputs alone than in the whole, and is checked alone."""
    model, ids = tiny("bert"), random_ids(2, 48)
    told = dry_run(model, data=ids, **ON)
    seen = counting(model)
    sinkscope.scan(model, data=ids)
    assert (len(seen), sum(seen)) == totals(told)
    assert [(each.what, each.sequences) for each in told.passes][1:3] == [("self-check", 2), ("self-check, outputs", 2)]


def test_a_batch_is_chosen_as_the_engine_chooses_it(tmp_path: Path) -> None:
    told = dry_run(folder(tmp_path, tiny("llama").config), device="cpu", **ON)
    assert (told.batch_size, told.seq_len) == (chosen_batch(256, CPU), 256)
    several = dry_run(folder(tmp_path, tiny("llama").config), data=["prose", "code"], bos=["auto", "never"], **ON)
    assert several.passes[-1].sequences == 4 * 32


def test_texts_handed_over_are_counted_as_those_of_a_file() -> None:
    told = dry_run(tiny("llama"), data=["one text", "another text"], seq_len=16, num_sequences=4, **ON)
    assert (told.passes[-1].sequences, told.passes[-1].length) == (4, 16)


ARMS = {
    "a grid": (["window:8+0", "window:8+2"], 1 + 2 + 2),
    "a control of two arms": (["value:first1", "keys:first1"], 1 + 2 + 2 * 2),
    "a random arm": (["heads:random2"], 1 + 2),
    "maps of two layers": (["map:0.1", "map:layer1"], 1 + 2),
    "late arms": (["neuron:1.3", "neuron:1.4", "keys:first1"], 1 + 2 + 2 + 1 + 2),
    "sinks kept beside": (["acts:8/token"], None),
}


@pytest.mark.parametrize("name", slow_but(ARMS, "late arms", "sinks kept beside"))
def test_arms_make_the_passes_that_are_told(name: str, tokenizer: Any) -> None:
    given, trials = ARMS[name]
    model = make_model()
    asked: dict[str, Any] = {"data": "prose", "seq_len": 32, "num_sequences": 3, "draws": 2}
    told = dry_run_arms(model, given, **asked, **ON)
    assert trials in (None, told.trials)
    seen = counting(model.base_model)
    arms(model, given, tokenizer=tokenizer, **asked)
    assert (len(seen), sum(seen)) == totals(told)


def test_layers_that_are_left_out_are_counted() -> None:
    """Four of five passes leave out one of two layers, which are alike; three more of 16 tokens try that out."""
    asked: dict[str, Any] = {"seq_len": 32, "num_sequences": 3, "draws": 2, **ON}
    late, early = (dry_run_arms(make_model(), [f"neuron:{layer}.{n}" for n in (0, 1)], **asked) for layer in (1, 0))
    single = dry_run_arms(make_model(num_hidden_layers=1), ["neuron:0.0", "neuron:0.1"], **asked)
    assert None not in (late.flops, early.flops, single.flops)
    whole, head = float(early.flops or 0), float(single.flops or 0)
    tried = whole * 3 * 16 / (5 * 3 * 32 + 16)
    assert whole - float(late.flops or 0) + tried == pytest.approx(4 / 5 * (whole - head), rel=0.05)
    assert any("4 of 5 passes over each sequence begin above the first layer" in note for note in late.notes)
    assert not early.notes


def test_an_arm_that_scans_first_or_needs_the_tokenizer_is_counted() -> None:
    asked: dict[str, Any] = {"seq_len": 32, "num_sequences": 4, "draws": 2}
    first = dry_run_arms(make_model(), ["first-token:x"], **asked, **ON)
    assert first.trials == 1 + 1 + 2
    with pytest.raises(SinkscopeError, match="give --run"):
        dry_run_arms(make_model(), ["dynamic:honor:5%"], **asked, **ON)
    with pytest.raises(SinkscopeError, match="no such kind of arm"):
        dry_run_arms(make_model(), ["nonesuch:1"], **asked, **ON)


def test_logits_are_in_the_memory_of_arms_alone() -> None:
    model = make_model()
    told = dry_run_arms(model, ["keys:first1"], seq_len=32, num_sequences=4, **ON)
    size = told.batch_size * 32 * model.config.vocab_size * 4
    assert told.memory.logits == size
    assert (told.memory.activations or 0) >= size
    assert dry_run(model, data=random_ids(4, 32), **ON).memory.logits == 0


# Configurations alone


LARGE = LlamaConfig(
    hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16",
)  # fmt: skip
SCRIPT = """
import sys
from sinkscope import dry_run
told = dry_run(sys.argv[1], seq_len=4096, machine="h100")
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(told.parameters, told.heads, told.found_by, peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "parameters", "heads"), [(LARGE, 403_752_042_496, 126 * 128), (DeepseekV3Config(), None, 61 * 128)]
)
def test_a_model_of_hundreds_of_billions_takes_two_gibibytes(
    config: Any, parameters: int | None, heads: int, tmp_path: Path
) -> None:
    """In KiB, of the process alone: what getrusage tells begins with the size of the process that started it."""
    words = [sys.executable, "-c", SCRIPT, folder(tmp_path, config)]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert parameters in (None, int(out[0]))
    assert (int(out[1]), " ".join(out[2:-1])) == (heads, DRY)
    assert int(out[-1]) < 2 * 2**20


def test_a_short_model_of_that_width_needs_so_many_gpus(tmp_path: Path) -> None:
    LARGE.num_hidden_layers = 2
    try:
        told = dry_run(folder(tmp_path, LARGE), seq_len=4096, batch_size=1, **ON)
    finally:
        LARGE.num_hidden_layers = 126
    matrices = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    assert told.parameters == 128256 * 16384 + 2 * (matrices + 2 * 16384) + 16384
    assert told.memory.weights == 2 * told.parameters
    assert told.time is not None
    assert told.time.rate == MACHINES["h100"].rates["bfloat16"] * UTILISATION
    assert told.flops == pytest.approx(2 * 2 * matrices * 32 * 4096, rel=0.05)
    assert told.gpus == 1


def test_a_model_without_attention_is_refused_as_a_scan_refuses_it(tmp_path: Path) -> None:
    config = MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=50)
    with pytest.raises(SinkscopeError, match="no attention of MambaModel could be read"):
        dry_run(folder(tmp_path, config), **ON)


def test_pictures_have_the_size_of_the_configuration(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    told = dry_run(folder(tmp_path, ViTConfig(**sizes, image_size=32, patch_size=8)), **ON)
    assert told.passes[-1].length == 17
    assert [(each.stream, each.calls, each.heads) for each in told.attention] == [("vision", 2, 2)]
    assert any("no folder of pictures" in note for note in told.notes)


def test_sound_has_the_size_of_the_configuration(tmp_path: Path) -> None:
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=60, max_source_positions=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    told = dry_run(folder(tmp_path, config), **ON)
    assert "encoder" in {each.stream for each in told.attention}


class Deciding(nn.Module):
    """Decides by a number that comes of its weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return output if bool((output.sum() > 0).item()) else -output


def test_where_numbers_decide_the_configuration_alone_is_told() -> None:
    model = outline_of(tiny("llama"), False)
    model.model.norm = Deciding(model.model.norm)
    told = looked(model.model, token_ids, [])
    assert told.plan is None
    assert "meta tensors" in str(told.why)


def test_the_screen_says_that_the_configuration_alone_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise SinkscopeError("LlamaModel cannot be run") from RuntimeError()

    monkeypatch.setattr("sinkscope.engine.forecast.build.plan", fail)
    told = dry_run(folder(tmp_path, tiny("gemma3").config), **ON)
    assert (told.found_by, told.time, told.gpus, told.fits) == (CONFIGURATION, None, None, None)
    assert [(each.kind, each.calls, each.path) for each in told.attention] == [("sliding", 2, None), ("full", 1, None)]
    shown = render_forecast(told)
    assert "cannot be estimated" in shown
    assert "found by the configuration alone" in shown


def test_quantised_weights_are_said_to_take_less(tmp_path: Path) -> None:
    config = tiny("llama").config
    config.quantization_config = {"quant_method": "fp8"}
    told = dry_run(folder(tmp_path, config), seq_len=16, dtype="bfloat16", **ON)
    assert told.memory.weights == 2 * told.parameters
    assert any("quantised" in note for note in told.notes)


def test_of_a_gguf_file_the_metadata_are_read(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", layers=1)
    told = dry_run(str(file), seq_len=16, **ON)
    assert (told.layers, told.dtype, told.memory.files) == (1, "float32", file.stat().st_size)
    file.write_bytes(b"x" * 50)
    with pytest.raises(SinkscopeError, match="damaged or not a GGUF file"):
        dry_run(str(file), **ON)


def test_a_model_of_vectors_reads_its_own_task() -> None:
    told = dry_run("example:trigger-relu", **ON)
    assert [(each.score, each.calls, each.heads) for each in told.attention] == [("relu", 1, 1)]
    assert (told.passes[-1].sequences, told.passes[-1].length) == (1000, 16)


@pytest.mark.slow
@pytest.mark.real
def test_an_example_that_is_not_converted_is_read_without_converting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINKSCOPE_CACHE", str(tmp_path / "cache"))
    told = dry_run("example:gemma-3-270m", **ON)
    assert (told.parameters, told.layers, told.heads) == (268_098_176, 18, 72)
    assert not (tmp_path / "cache").exists()


# The hub, and the command line


@pytest.mark.enable_socket
def test_of_a_hub_id_config_json_alone_is_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    with found(tmp_path / "cache") as hub:
        commit = hub.add("some/model", files_of(tiny_folder))
        told = dry_run("some/model", **ON)
        fetched = {path.rpartition("/")[2] for _, path in hub.asked if "resolve" in path or "storage" in path}
    assert fetched == {"config.json"}
    assert told.revision == commit
    assert told.memory.files == (tiny_folder / "model.safetensors").stat().st_size
    kept = [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file() and "snapshots" in each.parts]
    assert kept == ["config.json"]


@pytest.mark.enable_socket
def test_a_hub_out_of_reach_is_told_in_one_line(tmp_path: Path, tiny_folder: Path) -> None:
    with found(tmp_path / "cache") as hub:
        hub.add("some/model", files_of(tiny_folder))
        before = dry_run("some/model", **ON)
        hub.stop()
        assert dry_run("some/model", **ON).parameters == before.parameters
        with pytest.raises(SinkscopeError, match=r"cannot be reached .* is not in its cache"):
            dry_run("some/other", **ON)


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


COMMANDS = {
    "scan": [],
    "arms": ["--arm", "keys:first1"],
    "evict": ["--window", 8, "--sinks", "0,1", "--num-sequences", 4],
    "quant": ["--bits", "4", "--kept", "0,1", "--num-sequences", 4],
}


@pytest.mark.parametrize("command", slow_but(COMMANDS, "scan", "evict"))
def test_a_dry_run_of_a_command_writes_nothing(
    command: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (command, tiny_folder, *COMMANDS[command], "--seq-len", 32, "--dry-run", "--machine", "a100")
    shown = invoke(*words)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert max(map(len, shown.stdout.splitlines())) <= WIDTH
    assert f"Dry run of {command}" in shown.stdout
    assert "An estimate" in shown.stdout
    record = json.loads(invoke(*words, "--json").stdout)
    assert (record["command"], record["time"]["machine"]) == (command, "A100")
    assert [*tmp_path.iterdir()] == []


def test_several_models_make_a_list(tiny_folder: Path, copied: Path) -> None:
    shown = invoke("scan", tiny_folder, copied, "--dry-run", "--machine", "h100", "--seq-len", 32, "--json")
    assert [each["model"] for each in json.loads(shown.stdout)] == [str(tiny_folder), str(copied)]


BAD: dict[str, tuple[list[object], str]] = {
    "no such machine": (["--dry-run", "--machine", "h200x"], "--machine 'h200x': choose one of here, h100, a100"),
    "a machine alone": (["--machine", "h100"], "--machine goes with --dry-run"),
    "too long": (["--dry-run", "--seq-len", 10**6], "--seq-len 1000000 exceeds"),
    "an unknown dtype": (["--dry-run", "--dtype", "int3"], "unknown dtype 'int3'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(name: str, tiny_folder: Path) -> None:
    words, line = BAD[name]
    shown = invoke("scan", tiny_folder, *words)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"sinkscope: error: {line}")
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["{", '{"model_type": "nonesuch"}', '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_damaged_configuration_ends_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    shown = invoke("scan", tmp_path, "--dry-run")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("sinkscope: error: ")
    assert shown.stderr.count("\n") == 1


def test_a_configuration_of_too_many_weights_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", hidden_size=2**20, intermediate_size=2**30, num_hidden_layers=2)
    with pytest.raises(SinkscopeError, match="a model of more than any has"):
        dry_run(folder(tmp_path, config), **ON)


def test_shapes_compute_what_comes_of_positions_alone() -> None:
    weight = torch.empty(4, 4, device="meta")
    with Shapes() as shapes:
        places = torch.arange(3, device=weight.device)
        mask = places[:, None] >= places
        assert mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
        product = weight[places] @ weight
        assert product.is_meta
        with pytest.raises(RuntimeError, match="meta"):
            bool(product.sum() > 0)
    assert shapes.flops == 2 * 3 * 4 * 4


def test_a_rate_is_measured_and_durations_are_told() -> None:
    assert measured_rate(torch.float32, CPU, seconds=0.01) > 1e8
    assert [duration(each) for each in (0.31, 42, 200, 7200, 200000)] == [
        "0.3 s",
        "42 s",
        "3.3 min",
        "2.0 hours",
        "2.3 days",
    ]


def looks(forecast: Forecast) -> list[str]:
    """The passes in which a question looks for something in the model."""
    return [passes.what for passes in forecast.passes if passes.what.startswith("find ") and passes.sequences > 1]


@pytest.mark.slow
def test_no_pass_looks_for_weights_of_a_model_that_reads_pictures() -> None:
    """`all` leaves out the questions that need one, which takes token ids."""
    model, pixels = tiny_model(AutoModel, "vit"), {"pixel_values": torch.randn(2, 3, 32, 32)}
    assert not looks(dry_run(model, data=pixels, measure="all"))
    text = dry_run(tiny("llama"), data=random_ids(2, 16), measure="all")
    assert looks(text) == ["find W_V", "find rows of tokens", "find parts of blocks"]
    assert looks(dry_run(tiny("llama"), data=random_ids(2, 16), measure="spikes")) == ["find parts of blocks"]

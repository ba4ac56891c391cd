"""`sinkscope bench`: what is timed, what the screen says, what fits into memory. No test depends on speed."""

from __future__ import annotations

import copy
import json
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import tiny_model
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.engine.batch_size import free_bytes
from sinkscope.errors import SinkscopeError
from sinkscope.experiments import bench as speed
from sinkscope.experiments.bench import Passes, bench, peak_bytes
from sinkscope.present.terminal.bench import render_bench
from sinkscope.runs.saved.speed import BACKBONE, EAGER, LATER, PLAIN, SCAN, Cost, Speed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model(transformers.AutoModelForCausalLM, "llama")


def test_each_contender_runs_in_each_round(llama: Any) -> None:
    told: list[tuple[str, int, int]] = []
    result = bench(llama, seq_len=32, batch_size=2, rounds=3, progress=lambda *news: told.append(news))
    assert list(result.costs) == [PLAIN, BACKBONE, SCAN, LATER, EAGER]
    assert all(len(cost.seconds) == 3 and min(cost.seconds) > 0 for cost in result.costs.values())
    assert result.batch_size == 2
    assert result.costs[SCAN].tokens_per_second > 0
    assert [news for news in told if news[0] == "timing"] == [("timing", done, 20) for done in range(20)]
    assert ("memory", 4, 5) in told
    least, median, most = sorted(result.ratios[SCAN][PLAIN])
    assert result.ratios[SCAN][PLAIN] == (median, least, most)
    assert result.ratios[PLAIN][PLAIN] == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_a_model_without_a_next_token_head_has_no_plain_pass() -> None:
    result = bench(tiny_model(transformers.AutoModel, "bert"), seq_len=32, rounds=1)
    assert list(result.costs) == [BACKBONE, SCAN, LATER, EAGER]
    assert "/ plain" not in render_bench(result)


def test_the_length_keeps_to_the_model_s_positions(llama: Any) -> None:
    result = bench(llama, rounds=1, batch_size=1)
    assert result.seq_len == min(1024, llama.config.max_position_embeddings)
    with pytest.raises(SinkscopeError, match="exceeds"):
        bench(llama, seq_len=llama.config.max_position_embeddings + 1)


REFUSED: list[tuple[dict[str, int], str]] = [
    ({"rounds": 0}, "--rounds 0"),
    ({"seq_len": 31}, "at least 32 tokens"),
    ({"rounds": 10**12}, "at most 100,000"),
    ({"batch_size": 10**26}, "at most 1,000,000"),
    ({"batch_size": 0}, "--batch-size 0"),
    ({"batch_size": -1}, "--batch-size -1"),
]


def test_a_length_that_fits_no_model_is_refused_before_one_is_opened() -> None:
    with pytest.raises(SinkscopeError, match="--seq-len 31: at least 32 tokens"):
        bench("no-model", seq_len=31)


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_bad_options_are_refused(llama: Any, options: dict[str, int], said: str) -> None:
    with pytest.raises(SinkscopeError, match=said):
        bench(llama, **options)


def test_a_model_of_pictures_is_refused() -> None:
    with pytest.raises(SinkscopeError, match="does not read token ids"):
        bench(tiny_model(transformers.AutoModel, "vit"))


@pytest.mark.slow
def test_a_peak_is_what_was_held_at_once() -> None:
    def work() -> None:
        for _ in range(3):  # one after the other, by the system itself: C's allocator may keep what was freed
            with mmap.mmap(-1, 100 * 2**20) as memory:
                for page in range(0, len(memory), mmap.PAGESIZE):
                    memory[page] = 1

    peak = peak_bytes(work, CPU)
    if peak is None:
        pytest.skip("this system counts no peak of resident memory")
    assert 90 * 2**20 < peak < 190 * 2**20
    free = free_bytes(CPU)
    assert free is not None
    assert free > 0


def test_a_peak_counts_memory_that_an_earlier_pass_has_freed() -> None:
    """C keeps what was freed below a block that is still held: a pass that took it again had a peak of 0."""

    def work() -> list[torch.Tensor]:
        return [torch.ones(2**14) for _ in range(512)]  # 32 MiB, in pieces of 64 KiB

    held = work()[-1]
    peak = peak_bytes(work, CPU)
    if peak is None:
        pytest.skip("this system counts no peak of resident memory")
    assert 28 * 2**20 < peak < 100 * 2**20
    assert held.sum() == 2**14


def test_memory_that_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = torch.device("mps")
    assert free_bytes(other) is None
    assert peak_bytes(lambda: None, other) is None
    monkeypatch.setattr("sinkscope.experiments.bench.RESET", tmp_path / "no" / "proc")
    assert peak_bytes(lambda: None, CPU) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_memory_of_a_gpu(llama: Any) -> None:
    device = torch.device("cuda")
    peak = peak_bytes(lambda: torch.ones(25 * 2**20, device=device), device)
    assert peak is not None
    assert 100 * 2**20 <= peak < 110 * 2**20
    assert 0 < (free_bytes(device) or 0) <= torch.cuda.get_device_properties(device).total_memory
    result = bench(copy.deepcopy(llama).to(device), seq_len=32, rounds=1)
    assert all((cost.peak_bytes or 0) > 0 for cost in result.costs.values())


def test_an_accelerator_s_queue_is_empty_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    told: list[str] = []
    found = Passes.of(llama, True, torch.ones(1, 32, dtype=torch.long)).found
    passes = Passes(llama, found, {PLAIN: lambda ids: told.append("pass")})
    queue, clock = SimpleNamespace(synchronize=lambda: told.append("wait")), iter([0.0, 10.0, 12.5])

    def read() -> float:
        told.append("clock")
        return next(clock)

    monkeypatch.setattr(torch, "get_device_module", lambda device: queue)
    monkeypatch.setattr("sinkscope.experiments.bench.time", SimpleNamespace(perf_counter=read))
    assert passes.timed(torch.ones(1, 4, device="meta"), 1, lambda *_: None) == {PLAIN: [2.5]}
    assert told == ["clock", "pass", "wait", "clock", "pass", "wait", "clock"]


def test_the_longest_sequence_lies_on_the_line_through_two_peaks(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    """1,000 bytes a token and 5,000 of its own: 9,995 tokens fit into 10 million bytes."""
    passes = Passes.of(llama, True, torch.ones(1, 32, dtype=torch.long))
    monkeypatch.setattr(Passes, "peak", lambda self, name, ids: 5_000 + 1_000 * ids.shape[1])
    ids = torch.ones(2, 64, dtype=torch.long)
    assert speed._longest(passes, SCAN, ids, 10_000_000, None) == 9_995
    assert speed._longest(passes, SCAN, ids, 10_000_000, 100) == 9_995  # measured within the model's positions
    assert speed._longest(passes, SCAN, ids, 50_000, None) is None  # less is free than one pass took
    monkeypatch.setattr(Passes, "peak", lambda self, name, ids: 5_000)
    assert speed._longest(passes, SCAN, ids, 10_000_000, None) is None  # no growth seen: nothing can be said


def test_eager_maps_fit_by_their_size(llama: Any) -> None:
    passes = Passes.of(llama, True, torch.ones(1, 32, dtype=torch.long))
    heads = llama.config.num_attention_heads * llama.config.num_hidden_layers
    assert passes.map_bytes(10) == heads * 100 * 4
    cost = speed._cost(passes, EAGER, [1.0], torch.ones(1, 32, dtype=torch.long), heads * 4 * 5_000**2, None)
    assert cost.longest == 5_000


def test_what_would_end_the_machine_s_memory_is_left_out(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    maps = Passes.of(llama, True, torch.ones(1, 32, dtype=torch.long)).map_bytes(64)
    monkeypatch.setattr(speed, "free_bytes", lambda device: maps - 1)
    result = bench(llama, seq_len=64, batch_size=1, rounds=1)
    assert set(result.left_out) >= {EAGER}
    assert result.left_out[EAGER] == maps
    assert EAGER not in result.costs
    assert "eager is left out: its attention maps alone" in render_bench(result)


def measured() -> Speed:
    """Numbers that a bench may have found."""
    cost = Cost([1.0, 2.0, 4.0], 1234.5, 3 * 2**30, 32768)
    return Speed(
        "evil\x1b[2J/" + "model" * 8, "cpu", "float32", 2, 1024, 2, 0.25, 32768, 2**34,
        {PLAIN: cost, BACKBONE: cost, SCAN: Cost([2.0, 3.0, 4.0], 617.2, None, None), LATER: cost, EAGER: cost},
        {}, {"loading": 2.0, "hash": 1.5, "wait_for_hash": 0.25, "self_check": 0.5}, 2,
    )  # fmt: skip


def test_the_screen_keeps_to_80_columns_and_escapes_names() -> None:
    shown = render_bench(measured())
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    lines = shown.splitlines()
    row = next(line for line in lines if line.startswith("scan "))
    assert row.split() == ["scan", "3.000", "617", "1.50", "(1.00-2.00)", "1.50", "(1.00-2.00)", "-"]
    assert next(line for line in lines if line.startswith("plain ")).endswith("3,072 MiB")
    assert "16.0 GiB free" in shown
    words = " ".join(shown.split())
    assert "takes about 34 s here after its start, of which 6% for matrix_entropy" in words  # 16 batches of 2 s, 2 more
    assert "loading 2.0 s, dry run 0.2 s, hash of the weights 1.5 s beside the loading, which waits 0.2 s" in words
    assert "scan unknown" in " ".join(shown.split())
    assert "32,768 tokens (the model's own limit)" in " ".join(shown.split())


def test_the_command_s_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "bench", lambda *_, **__: measured())
    assert CliRunner().invoke(app, ["bench", "example:trigger-softmax"]).stdout == render_bench(measured())


def test_the_command(tmp_path: Path, llama: Any) -> None:
    llama.save_pretrained(tmp_path / "tiny")
    words = ["bench", str(tmp_path / "tiny"), "--seq-len", "32", "--rounds", "1", "--quiet", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert set(facts["costs"]) == {PLAIN, BACKBONE, SCAN, LATER, EAGER}
    assert set(facts["start"]) == {"loading", "hash", "wait_for_hash", "self_check"}
    assert 0 <= facts["start"]["wait_for_hash"] < facts["start"]["loading"]
    assert facts["contenders"][SCAN].startswith("backbone")
    result = CliRunner().invoke(app, ["bench", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1

"""Every launch of the Triton kernels compiles ahead of time, fits its GPU, and takes what docs/speed.md says."""

from __future__ import annotations

import os
import random
from pathlib import Path

import ahead
import pytest
from ahead import TARGETS, Launch, Taken, every_launch, shown
from random_share import share_of
from tiers import slow_but

PAGE = (Path(__file__).parents[2] / "docs" / "speed.md").read_text("utf-8")
MEASURED_WITH = "3.9.0"
"""The version of Triton that the table's figures are of; other versions choose other registers."""
FEW = [
    Launch("sm_80", "column_sums", "bfloat16", (64, 64), "causal"),
    Launch("sm_90", "column_sums", "float32", (64, 64), "causal"),
]

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def table() -> dict[str, str]:
    """The table's rows, by the cells that name a launch."""
    rows = [line for line in PAGE.splitlines() if line.startswith(("| sm_", "| gfx"))]
    return {" |".join(line.split(" |")[:5]): line for line in rows}


def held(launch: Launch) -> None:
    """Compiles a launch, and holds what it takes to its GPU's shared memory and to the table."""
    taken = launch.taken()
    assert 0 < taken.shared <= TARGETS[launch.target].shared * 1024
    if launch.target in ("sm_80", "sm_90") and max(launch.widths) <= 128 and triton.__version__ == MEASURED_WITH:
        assert taken.spilled == 0, f"{launch} spills {taken.spilled} bytes a thread"
    row = launch.row(taken)
    expected = table().get(" |".join(row.split(" |")[:5]))
    if expected is not None and triton.__version__ == MEASURED_WITH:
        assert row == expected, "python tests/gpu/ahead.py prints the table of docs/speed.md"


@pytest.mark.parametrize("launch", slow_but(FEW, FEW[0]), ids=str)
def test_a_few_launches_compile(launch: Launch) -> None:
    held(launch)


DRAWN = 16
"""Launches drawn for each target: all of them, 2,304, would take hours. SINKSCOPE_FUZZ_SEED=N draws others."""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_drawn_launches_compile(target: str) -> None:
    """A target that the installed Triton cannot compile for is left out, and only that one."""
    probe = next(each for each in every_launch([target]) if each.kernel == "column_sums")
    try:
        probe.taken()
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        pytest.skip(f"triton {triton.__version__} does not compile for {target}: {type(error).__name__}: {first}")
    draw = random.Random(f"{target} {os.environ.get('SINKSCOPE_FUZZ_SEED', '0')}")
    for launch in draw.sample(every_launch([target]), share_of(DRAWN)):
        held(launch)


def test_the_table_has_the_launches_that_it_shows() -> None:
    expected = {" |".join(each.row(Taken(0, 0, 0)).split(" |")[:5]) for each in shown()}
    assert set(table()) == expected


def test_no_launch_of_the_table_spills() -> None:
    assert all(line.split("|")[-2].strip() == "0" for line in table().values())


def test_what_all_launches_take_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is in the file is not compiled again; one that fails is written down."""
    wide = Launch("sm_86", "row_sums", "float32", (512, 512), "all")
    launches = [*FEW, wide]
    asked: list[Launch] = []

    def taken(launch: Launch) -> Taken:
        asked.append(launch)
        if launch.target == "sm_90":
            raise RuntimeError("no such GPU")
        return Taken(100 * 1024, 64, 8 if launch is wide else 0)

    monkeypatch.setattr(ahead, "every_launch", lambda targets=("sm_80", "sm_86", "sm_90"): [
        each for each in launches if each.target in targets
    ])  # fmt: skip
    monkeypatch.setattr(Launch, "taken", taken)
    file = tmp_path / "all.jsonl"
    ahead.compile_all(file)
    ahead.compile_all(file)
    assert sorted(map(str, asked)) == sorted(map(str, launches)), "each once"
    rows = {row.split(" |")[0]: row for row in ahead.summary(ahead.results(file))}
    assert rows["| sm_80"] == "| sm_80 | 1 | 1 | 0 | 0 | 102,400 | 0 | 0 | 0 |"
    assert rows["| sm_86"] == "| sm_86 | 1 | 1 | 0 | 1 | 102,400 | 0 | 1 | 8 |"
    assert rows["| sm_90"] == "| sm_90 | 0 | 1 | 1 | 0 | 0 | 0 | 0 | 0 |"


def test_figures_are_read_from_an_amd_assembly() -> None:
    text = "    .private_segment_fixed_size: 12\n    .vgpr_count:     64\n    .vgpr_spill_count: 3\n"
    assert ahead.of_amd(text) == (64, 12)
    with pytest.raises(ValueError, match="vgpr_count"):
        ahead.of_amd("")

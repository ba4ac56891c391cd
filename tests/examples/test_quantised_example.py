"""examples/quantised.py: each method names a configuration of transformers, and a run comes out that compares."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sinkscope
from sinkscope.runs.run import load_run

PLACE = Path(__file__).parents[2] / "examples" / "quantised.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("quantised", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(place: str) -> None:
        raise ImportError("bitsandbytes is needed: `pip install bitsandbytes`")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", missing)
    monkeypatch.setattr("sys.argv", ["quantised.py", "nf4", "--model", "here", "--out", "there"])
    with pytest.raises(SystemExit, match=r"^quantised.py: bitsandbytes is needed: `pip install bitsandbytes`$"):
        runpy.run_path(str(PLACE), run_name="__main__")


@pytest.mark.slow
def test_the_unquantised_run_is_that_of_a_scan(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--seq-len", "24", "--num-sequences", "2"]
    monkeypatch.setattr("sys.argv", ["x", "plain", "--model", str(tiny_folder), "--out", str(tmp_path / "run"), *sizes])
    example().main()
    scan = sinkscope.scan(str(tiny_folder), seq_len=24, num_sequences=2)
    np.testing.assert_allclose(load_run(tmp_path / "run").heads["bos_mass"], scan.heads["bos_mass"], rtol=1e-5)


def test_the_page_and_the_script_name_the_same_methods() -> None:
    page = (PLACE.parents[1] / "docs" / "quantised.md").read_text("utf-8")
    for method in example().METHODS.keys() - {"plain"}:
        assert f"| `{method}` |" in page

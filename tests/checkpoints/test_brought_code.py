"""A checkpoint that brings Python code is measured by that code or not at all, and says so where it is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Refused, Scan
from tiers import slow_but

from sinkscope.checkpoints.loading import open_checkpoint
from sinkscope.checkpoints.sources import LoadOptions
from sinkscope.errors import SinkscopeError

OWN = """
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
class Own(LlamaModel): pass
class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Own(config)
        self.post_init()
"""
BASE, WHOLE = {"AutoModel": "own.Own"}, {"AutoModelForCausalLM": "own.OwnForCausalLM"}
TRUSTED = LoadOptions(trust_remote_code=True)


@pytest.fixture
def own(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """own(code, names): the folder of a Llama whose config.json names the classes of its `own.py`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(copied.parent / "modules"))

    def made(code: str | None, names: dict[str, str]) -> Path:
        config = json.loads((copied / "config.json").read_text("utf-8")) | {"auto_map": names}
        (copied / "config.json").write_text(json.dumps(config), "utf-8")
        if code is not None:
            (copied / "own.py").write_text(code, "utf-8")
        return copied

    return made


@pytest.mark.parametrize("code", ["def (", "OTHER = 1", None, "raise ValueError('made for another release')"])
def test_code_that_fails_is_no_reason_to_measure_another_class(code: str | None, own: Any, refused: Refused) -> None:
    """The checkpoint names LlamaForCausalLM, too, which transformers has: it would load, and attend as it does."""
    folder = own(code, BASE)
    line = refused(folder, "--trust-remote-code")
    assert line.startswith(f"cannot load {folder} by its own Python code: ")
    assert line.endswith("; without --trust-remote-code the model that transformers has for it is measured")


def test_code_that_has_a_model_with_a_head_alone_is_run(own: Any) -> None:
    """Of it the base is measured; transformers' own LlamaModel was."""
    assert type(open_checkpoint(str(own(OWN, WHOLE)), TRUSTED).model).__name__ == "Own"


def test_a_head_that_the_code_lacks_is_not_transformers_own(own: Any) -> None:
    folder = own(OWN, BASE)
    assert type(open_checkpoint(str(folder), TRUSTED).model).__name__ == "Own"
    with pytest.raises(SinkscopeError, match="names no AutoModelForCausalLM"):
        open_checkpoint(str(folder), LoadOptions(trust_remote_code=True, head=True))


@pytest.mark.parametrize("names", slow_but([BASE, WHOLE], WHOLE))
def test_code_that_is_left_out_is_named(names: dict[str, str], own: Any, scan_cli: Scan) -> None:
    outcome = scan_cli(own(OWN, names))
    assert outcome.code == 0, outcome.stderr
    [line] = [line for line in outcome.warnings if "was not run: LlamaModel of transformers is measured" in line]
    assert line in outcome.json("manifest")["warnings"]


@pytest.mark.parametrize("names", [{"AutoTokenizer": "own.Tokens"}, ["own.Own"]])
def test_code_of_no_model_is_not_named(names: Any, own: Any) -> None:
    assert open_checkpoint(str(own(None, names)), LoadOptions()).warnings == []


def test_code_that_ends_the_program_is_no_failed_check(own: Any, refused: Refused) -> None:
    """sys.exit(1) would be the exit code of a failed check, without a word."""
    folder = own("import sys\nsys.exit(1)\n", BASE)
    assert refused(folder, "--trust-remote-code") == (
        f"cannot load {folder}: its own Python code ends the program (exit code 1)"
    )

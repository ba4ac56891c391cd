"""sinkscope.watch where conditions differ: in what attends, in what is read, or in nothing but their name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import VOCABULARY, tiny
from torch import Tensor, nn
from transformers import DynamicCache
from watched import warnings_of
from writers import CACHE

import sinkscope
from sinkscope import Run, compare
from sinkscope.capture.given import given_digests
from sinkscope.comparison.baseline import baseline_of
from sinkscope.comparison.compare_runs import NotPaired
from sinkscope.comparison.gate import check
from sinkscope.engine.watching.following import CUT
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.run import render_run

HEADS = 2


class Two(nn.Module):
    """Two attentions, one of which runs in a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late = (nn.MultiheadAttention(16, HEADS, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, which)(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def vectors(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 20, 16, generator=torch.Generator().manual_seed(seed))


def watched(*calls: tuple[str, str, Tensor]) -> Run:
    """A run of calls (label, module, input)."""
    model = Two().eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for label, which, x in calls:
            seen.label(label)
            model(x, which)
    return seen.run()


def mass(which: str, x: Tensor) -> np.ndarray:
    """bos_mass of each head in float64, mean over sequences, from torch's own maps."""
    model = Two().double()
    maps = getattr(model, which)(x.double(), x.double(), x.double(), average_attn_weights=False)[1]
    return np.asarray(maps[:, :, 1:, 0].mean((0, 2)).detach())


def test_conditions_that_run_other_modules_are_one_run(tmp_path: Path) -> None:
    run = watched(("encode", "early", vectors(1)), ("decode", "late", vectors(2, rows=4)))
    assert run.heads[["domain", "layer", "module"]].drop_duplicates().values.tolist() == [
        ["encode", 0, "early"], ["decode", 1, "late"],
    ]  # fmt: skip
    expected = np.concatenate([mass("early", vectors(1)), mass("late", vectors(2, rows=4))])
    np.testing.assert_allclose(run.heads["bos_mass"], expected, atol=1e-6)
    assert run.domains is None
    stream = run.summary.streams["text"]
    assert (stream.layers, stream.heads, stream.sequences) == (2, 4, 7)
    averages = [mass("early", vectors(1)[[row]]).mean() for row in range(3)]
    averages += [mass("late", vectors(2, rows=4)[[row]]).mean() for row in range(4)]
    assert stream.bos_mass.mean == pytest.approx(np.mean(averages), abs=1e-6)
    of_domains = {name: domain.streams["text"] for name, domain in run.summary.domains.items()}
    assert {name: (part.layers, part.heads, part.sequences) for name, part in of_domains.items()} == {
        "encode": (1, 2, 3), "decode": (1, 2, 4),
    }  # fmt: skip
    assert "decode" in render_run(run)
    run.save(tmp_path / "run")
    assert render_report([sinkscope.load_run(tmp_path / "run")])
    assert compare(run, run).heads["difference"].eq(0).all()


def test_modules_that_take_turns_are_layers_of_one_domain() -> None:
    calls = [("watched", which, vectors(seed, rows=1)) for seed in range(4) for which in ("early", "late")]
    run = watched(*calls)
    assert run.heads[["layer", "module"]].drop_duplicates().values.tolist() == [[0, "early"], [1, "late"]]
    together = torch.cat([vectors(seed, rows=1) for seed in range(4)])
    np.testing.assert_allclose(run.heads["bos_mass"], [*mass("early", together), *mass("late", together)], atol=1e-6)
    assert warnings_of(run) == []


def test_sequences_that_no_table_can_hold_are_named() -> None:
    run = watched(*[("watched", "early", vectors(seed)) for seed in range(2)], ("watched", "late", vectors(2)))
    assert set(run.heads["module"]) == {"early"}
    (told,) = warnings_of(run)
    assert told == (
        "3 sequences of watched are left out: the model made the attention call late for them, and not for its other "
        "6; give them a label of their own"
    )


class Looped(nn.Module):
    """Calls one module as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, HEADS, batch_first=True)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = x + self.attend(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.parametrize(
    ("rare", "said"),
    [(3, "attend[2] for them, and not for its other 6"), (1, "attend[1] for its other 6, and not for")],
)
def test_passes_of_another_depth_are_named_by_the_call_that_tells_them_apart(rare: int, said: str) -> None:
    model = Looped().eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for seed, times in enumerate((2, rare, 2)):
            model(vectors(seed), times)
    (told,) = warnings_of(seen.run())
    assert told.startswith(f"3 sequences of watched are left out: the model made the attention call {said}")


@pytest.mark.parametrize("label", ["watched", "halved"])
def test_a_call_that_changes_its_number_of_heads_is_named(label: str) -> None:
    """No table holds both, be it in one domain or in two."""
    model = Looped().eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(vectors(1), 1)
        model(vectors(2), 1)
        seen.label(label)
        model.attend.num_heads, model.attend.head_dim = 1, 16
        model(vectors(3), 1)
    run = seen.run()
    assert len(run.heads) == HEADS
    assert warnings_of(run) == [
        f"3 sequences of {label} are left out: attend has 1 head in them and {HEADS} in others; watch them one by one"
    ]


class Turned(nn.Module):
    """An attention that reads its own sequence, or another one."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, HEADS, batch_first=True)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        read = x if other is None else other
        return self.attend(x, read, read, need_weights=False)[0]  # type: ignore[no-any-return]


def test_a_module_is_not_put_into_two_streams() -> None:
    model = Turned().eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        seen.label("own")
        model(vectors(1))
        seen.label("another")
        model(vectors(1), torch.randn(3, 30, 16))
    run = seen.run()
    assert run.sequences["domain"].unique().tolist() == ["own"]
    assert warnings_of(run)[0].startswith("3 sequences of another are left out: attend reads its own sequence in")


@pytest.fixture(scope="module")
def pressed() -> Run:
    """One text read twice: as it is, and by a model whose queries were made longer."""
    model = tiny("llama")
    ids = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        seen.label("as it is")
        model(ids)
        seen.label("sharper")
        for layer in model.layers:
            layer.self_attn.q_proj.weight *= 3
        model(ids)
    return seen.run()


def test_conditions_over_one_text_are_paired_by_their_names(pressed: Run) -> None:
    """They have one fingerprint: each must meet itself in another run."""
    assert len({data.fingerprint for data in pressed.manifest.data}) == 1
    assert pressed.domains is not None
    assert pressed.domains["paired"].all()
    assert pressed.domains["difference"].abs().max() > 1e-3
    result = compare(pressed, pressed)
    assert result.heads["difference"].eq(0).all()
    assert result.heads["domain"].unique().tolist() == ["as it is", "sharper"]
    verdict = check(pressed, baseline_of(pressed))
    assert verdict.passed
    assert {tally.domain: tally.largest for tally in verdict.tallies} == {"as it is": 0, "sharper": 0}


def test_a_condition_that_one_run_lacks_is_not_compared_with_another_one(pressed: Run) -> None:
    model = tiny("llama")
    ids = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        seen.label("as it is")
        model(ids)
    for a, b in ((pressed, seen.run()), (seen.run(), pressed)):
        result = compare(a, b)
        assert result.heads["domain"].unique().tolist() == ["as it is"]
        assert result.heads["difference"].eq(0).all()
        assert any("sharper" in note for note in result.notes)


@pytest.mark.parametrize("paired", [True, False])
def test_inputs_without_tokens_pair_where_they_are_the_same(paired: bool) -> None:
    a = watched(("watched", "early", vectors(1)))
    b = watched(("watched", "early", vectors(1 if paired else 2)))
    same = a.manifest.data[0].fingerprint == b.manifest.data[0].fingerprint
    assert same == paired
    both = watched(("a", "early", vectors(1)), ("b", "early", vectors(1 if paired else 2)))
    assert both.domains is not None
    assert both.domains["paired"].eq(paired).all()
    if paired:
        assert compare(a, b).paired
    else:
        with pytest.raises(NotPaired):
            compare(a, b)


def test_texts_that_differ_are_no_pairs() -> None:
    model = tiny("llama")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for seed, label in enumerate(("first", "second")):
            seen.label(label)
            model(torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(seed)))
    table = seen.run().domains
    assert table is not None
    assert not table["paired"].any()


def test_a_digest_tells_what_each_sequence_was_given() -> None:
    x = vectors(1)
    named = given_digests((), {"x": x, "steps": 4}, 3, False)
    assert named is not None
    assert len(set(named)) == 3
    assert given_digests((), {"steps": 4, "x": x.clone()}, 3, False) == named, "the order of names says nothing"
    other = x.clone()
    other[1, 0, 0] += 1e-6
    changed = given_digests((), {"x": other, "steps": 4}, 3, False)
    assert changed is not None
    assert [a == b for a, b in zip(named, changed, strict=True)] == [True, False, True]
    assert given_digests((), {"x": x, "steps": 5}, 3, False) != named
    assert given_digests((), {"x": x.transpose(1, 2), "steps": 4}, 3, False) != named
    assert given_digests((), {"x": x, "steps": 4, "attention_mask": torch.ones(3, 20)}, 3, False) == named
    nested = given_digests(({"x": [x, {"y": x}]},), {}, 3, False)
    assert nested is not None
    assert len(set(nested)) == 3


@pytest.mark.parametrize(
    ("kwargs", "tokens", "none"),
    [
        ({"ids": torch.zeros(2, 4, dtype=torch.long)}, True, True),
        ({"ids": torch.zeros(2, 4, dtype=torch.long)}, False, False),
        ({"pixels": torch.zeros(2, 3, 4, 4)}, True, False),
        ({"mask": torch.zeros(2, 1, 4, 4)}, True, True),
        ({}, False, False),
        ({"empty": torch.zeros(0, 4)}, False, False),
        ({"number": torch.tensor(1.5)}, False, False),
    ],
)
def test_token_ids_alone_need_no_digest(kwargs: dict[str, Any], tokens: bool, none: bool) -> None:
    assert (given_digests((), kwargs, 2, tokens) is None) == none


def test_a_tensor_without_numbers_is_like_no_other() -> None:
    x = torch.zeros(2, 4, device="meta")
    assert given_digests((x,), {}, 2, False) != given_digests((x,), {}, 2, False)
    half = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert given_digests((half,), {}, 2, False) == given_digests((half,), {}, 2, False)


@pytest.mark.filterwarnings("ignore:sinkscope")
@pytest.mark.parametrize("ends", ["label", "run", "reset"])
def test_a_text_that_goes_on_after_its_condition_is_named(ends: str) -> None:
    """Its first tokens are measured, or forgotten; what follows over the same cache belongs to no condition."""
    model = tiny("llama")
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        cache = DynamicCache(config=model.config)
        model(ids, **{CACHE: cache})
        for name in ("second",) if ends == "reset" else ("second", "third"):
            {"label": lambda name=name: seen.label(name), "run": seen.run, "reset": seen.reset}[ends]()
            model(ids, **{CACHE: cache})
    again = "" if ends == "reset" else " (2 times)"
    assert seen.left_out == [f"{CUT}{again}"]
    assert seen.sequences == (0 if ends == "reset" else 2)

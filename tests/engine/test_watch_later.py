"""What a watch computes once the program is done, and what it does not compute again."""

from __future__ import annotations

import gc

import pytest
import torch
from models import VOCABULARY, tiny
from same_runs import assert_same

import sinkscope
from sinkscope.capture import views
from sinkscope.engine import collector
from sinkscope.metrics import spectra


def ids(seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(seed))


def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the matrices that are solved from now on."""
    sizes = list[int]()
    inner = spectra._entropy

    def counted(gram: torch.Tensor) -> torch.Tensor:
        sizes.append(len(gram))
        return inner(gram)

    monkeypatch.setattr(spectra, "_entropy", counted)
    return sizes


def test_eigenvalues_wait_until_the_run_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = tiny("llama"), solved(monkeypatch)
    layers = model.config.num_hidden_layers
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids(1))
        assert not sizes
        first = seen.run()  # of a watch that goes on
        assert len(sizes) == layers
        model(ids(2))
        assert len(sizes) == layers
    both = seen.run()
    assert len(sizes) == 2 * layers
    assert_same(first, sinkscope.scan(model, data=ids(1)))
    assert_same(both, sinkscope.scan(model, data=torch.cat([ids(1), ids(2)])))
    assert both.layers.matrix_entropy.notna().all()


def test_an_interruption_leaves_no_value_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids(1))
    with monkeypatch.context() as patched:
        patched.setattr(collector, "solve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            seen.run()
    assert_same(seen.run(), sinkscope.scan(model, data=ids(1)))


def interrupted(waiting: list[spectra.SpectrumEntropy]) -> None:
    raise KeyboardInterrupt


def test_what_a_reset_forgets_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = tiny("llama"), solved(monkeypatch)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids(1))
        seen.reset()
        model(ids(2))
    assert_same(seen.run(), sinkscope.scan(model, data=ids(2)))
    assert len(sizes) == 2 * model.config.num_hidden_layers, "those of the watch, and those of the scan"


def test_matrices_that_wait_take_a_bounded_part_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = tiny("llama"), solved(monkeypatch)
    monkeypatch.setattr(collector, "WAITING_BYTES", 1)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids(1))
    assert len(sizes) == model.config.num_hidden_layers
    assert_same(seen.run(), sinkscope.scan(model, data=ids(1)))


def test_a_later_watch_factorises_no_weight_again_that_kept_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    made = list[torch.Size]()
    inner = views.factors_of

    def counted(weight: torch.Tensor, heads: int, width: int) -> torch.Tensor:
        made.append(weight.shape)
        return inner(weight, heads, width)

    monkeypatch.setattr(views, "factors_of", counted)

    def watched() -> sinkscope.Run:
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(ids(1))
        return seen.run()

    first = watched()
    assert len(made) == model.config.num_hidden_layers
    assert_same(watched(), first)
    assert len(made) == model.config.num_hidden_layers
    with torch.no_grad():
        model.layers[0].self_attn.o_proj.weight[0, 0] += 1
    changed = watched()
    assert len(made) == model.config.num_hidden_layers + 1
    assert_same(changed, sinkscope.scan(model, data=ids(1)))


def test_the_factors_of_a_model_go_with_it() -> None:
    model = tiny("llama")
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids(1))
    seen.run()
    before = len(views._LEFT)
    assert model in views._LEFT
    del model, seen
    gc.collect()
    assert len(views._LEFT) < before

"""Arms whose lower layers are not run again: the same numbers to the last bit, and what cannot be left out is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import causal, setting_of
from families import tiny_model
from models import random_ids
from tiers import slow_but
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from watched import find

from sinkscope.capture.hooks import hooked, instead
from sinkscope.checkpoints import wrap_model
from sinkscope.experiments.arms import engine, replay
from sinkscope.experiments.arms.arm import Arm, Pass, Setting
from sinkscope.experiments.arms.engine import measure, starts_of, trials_of
from sinkscope.experiments.arms.grammar import read_arm
from sinkscope.experiments.arms.head_choice import Score
from sinkscope.experiments.arms.kinds.dynamic import DynamicHeads
from sinkscope.experiments.arms.kinds.massive import ReplacedElements
from sinkscope.experiments.arms.replay import Layers, kept_starts

IDS = random_ids(3, 40)
NAMES = (
    "heads:2.0", "heads:1.0+2.1", "heads:random1", "value:first1", "keys:first1", "window:8+1", "window:8+1/full",
    "window:8+1/random2", "kv:3+first1", "acts:8/token", "neuron:1.3", "neuron:2.random",
)  # fmt: skip


def silent(*_: Any) -> None:
    """Shows no progress."""


def dynamic(setting: Setting) -> Arm:
    """Heads of the last layer in the first two sequences, none in the third."""
    last = setting.sites[-1]
    chosen = {site.name: torch.zeros(len(IDS), site.heads, dtype=torch.bool) for site in setting.sites}
    chosen[last.name][:2, 1] = True
    return DynamicHeads(Score("x", True), 0.1, 0.0, chosen)


def numbers(setting: Setting, arms: list[Arm]) -> np.ndarray:
    return np.stack([np.stack(list(each.values.values())) for each in measure(setting, arms, 2, silent)])


def run_twice(setting: Setting, arms: list[Arm], monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """What is measured with layers left out, and with every pass whole."""
    found = numbers(setting, arms)
    with monkeypatch.context() as patched:
        patched.setattr(Layers, "start", lambda *_: 0)
        return found, numbers(setting, arms)


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma3"], "gemma3"))
@pytest.mark.parametrize("size", slow_but([2, 16], 2))
def test_every_kind_of_arm_has_the_numbers_of_a_whole_pass(
    family: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of(causal(family).float(), IDS)
    monkeypatch.setattr(engine, "batch_size", lambda *_: size)
    arms = [read_arm(name).ready(setting) for name in NAMES]
    arms += [dynamic(setting), ReplacedElements("zero", elements={"h.1" if family == "gpt2" else "layers.1": [0, 3]})]
    batches = [(0, 3)] if size == 16 else [(0, 2), (2, 1)]
    starts = starts_of(setting, Layers(setting), trials_of(arms, 2), batches)
    assert {0, 1, 2} <= set(starts[0]), "some passes start late"
    assert size == 16 or max(starts[2]) == 3, "no head of the last sequence: not one layer runs again"
    found, whole = run_twice(setting, arms, monkeypatch)
    np.testing.assert_array_equal(found, whole)
    assert len(np.unique(found[:, 0], axis=0)) > 8, "the arms do something"
    assert all("forward" not in vars(module) for module in setting.model.modules())


def start(setting: Setting, arm: Arm | str) -> int:
    """The layer at which a pass under the arm starts."""
    ready = read_arm(arm).ready(setting) if isinstance(arm, str) else arm
    return starts_of(setting, Layers(setting), trials_of([ready], 2), [(0, len(IDS))])[0][1]


def any_setting(model: Any) -> Setting:
    """The setting also of a model that `arms` refuses, because it predicts no next token."""
    checkpoint = wrap_model(causal("llama"), None, head=True)
    checkpoint.model = model
    return Setting(checkpoint, model.base_model, find(model.base_model)[1], IDS, None, 0, 0.3)


def loud(model: Any) -> Any:
    """The model with weights large enough for every change to show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize(
    ("auto", "family", "expected"),
    slow_but(
        [
            (AutoModelForCausalLM, "bert", 1),
            (AutoModelForCausalLM, "zamba", 3),  # one attention module in two layers of four
            (AutoModelForCausalLM, "gemma3n_text", 0),  # its last layers attend to keys of earlier ones
            (AutoModelForMaskedLM, "albert", 0),  # one layer, called twice
            (AutoModelForSeq2SeqLM, "t5", 0),  # two lists of layers
        ],
        (AutoModelForCausalLM, "zamba", 3),
        (AutoModelForMaskedLM, "albert", 0),
    ),
)
def test_other_families_lose_nothing_by_it(
    auto: Any, family: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = any_setting(loud(tiny_model(auto, family)))
    assert start(setting, LastCall()) == expected
    found, whole = run_twice(setting, [LastCall()], monkeypatch)
    np.testing.assert_array_equal(found, whole)
    assert (found[1, 0] != found[0, 0]).all()


class LastCall(Arm):
    """The values of the last attention call doubled."""

    name = "last call"  # type: ignore[assignment]

    def changes(self, forward: Pass) -> list[str]:
        return [forward.setting.sites[-1].module]

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        last = forward.setting.sites[-1]

        def doubled(site: Any, call: Any) -> Any:
            return replace(call, value=2 * call.value) if site == last else call

        with forward.changed(doubled):
            yield


class Remembering(LlamaDecoderLayer):  # type: ignore[misc]
    """A layer whose output the model's last layer finds in the layer itself, as a cache of its own."""

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        self.kept = super().forward(hidden_states, **keywords)
        return self.kept


class Recalling(LlamaDecoderLayer):  # type: ignore[misc]
    """Adds what another layer remembers."""

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden_states, **keywords)
        return output + self.other[0].kept


class InPlace(LlamaDecoderLayer):  # type: ignore[misc]
    """Writes its output over its input."""

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return hidden_states.copy_(super().forward(hidden_states, **keywords))


def with_layers(model: Any, kinds: dict[int, type[LlamaDecoderLayer]]) -> Any:
    layers = model.base_model.layers
    for place, kind in kinds.items():
        own = kind(model.config, place).to(next(model.parameters()).dtype).eval()
        own.load_state_dict(layers[place].state_dict())
        own.other = [layers[0]]
        layers[place] = own
    return model


def test_state_that_a_layer_leaves_behind_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer reads what the first one computed last: in the pass before, which is another text's."""
    setting = setting_of(with_layers(causal("llama").float(), {0: Remembering, 2: Recalling}), IDS)
    assert start(setting, "heads:2.0") == start(setting, "heads:1.0") == 0
    found, whole = run_twice(setting, [read_arm("heads:2.0").ready(setting)], monkeypatch)
    np.testing.assert_array_equal(found, whole)


def test_layers_that_write_over_their_input_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = setting_of(with_layers(causal("llama").float(), {1: InPlace, 2: InPlace}), IDS)
    assert (start(setting, "heads:2.0"), start(setting, "heads:1.0")) == (2, 1)
    arms = [read_arm(name).ready(setting) for name in ("heads:2.0", "heads:1.0", "heads:2.1")]
    found, whole = run_twice(setting, arms, monkeypatch)
    np.testing.assert_array_equal(found, whole)


def test_hooks_of_the_user_are_called_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("llama").float()
    model.base_model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    setting = setting_of(model, IDS)
    found, whole = run_twice(setting, [read_arm("heads:2.0").ready(setting)], monkeypatch)
    np.testing.assert_array_equal(found, whole)


@dataclass(frozen=True)
class Deceiving(Arm):
    """Reads other ids, and says that it changes the last layer."""

    name = "deceiving"  # type: ignore[assignment]

    def changes(self, forward: Pass) -> list[str]:
        return ["layers.2"]

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        forward.ids = forward.ids.flip(-1)
        yield


def test_an_arm_that_reads_other_ids_runs_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = setting_of(causal("llama").float(), IDS)
    found, whole = run_twice(setting, [Deceiving()], monkeypatch)
    np.testing.assert_array_equal(found, whole)
    assert (found[1, 0] != found[0, 0]).all()


def test_the_layers_below_the_start_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("llama").float()
    setting = setting_of(model, IDS)
    arms = [read_arm(name).ready(setting) for name in ("heads:2.0", "heads:1.0", "keys:first1")]
    ran: list[int] = []
    monkeypatch.setattr(Layers, "sound", lambda self, starts, *_: (set(starts), 1))
    with ExitStack() as stack:
        for place, layer in enumerate(model.base_model.layers):
            stack.enter_context(hooked(layer.mlp, post=lambda *_, place=place: ran.append(place)))
        measure(setting, arms, 2, silent)
    assert ran == [0, 1, 2, 2, 1, 2, 0, 1, 2]


def test_no_more_is_kept_than_the_bound_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, known = [0, 5, 2, 9, 9, 9, 4, 7, 2], {2, 4, 5, 7, 9}
    assert kept_starts(asked, known, 10) == asked
    assert kept_starts(asked, {2, 7}, 10) == [0, 2, 2, 7, 7, 7, 2, 7, 2], "the last that is sound"
    monkeypatch.setattr(replay, "KEPT_BYTES", 25)
    assert kept_starts(asked, known, 10) == [0, 2, 2, 7, 7, 7, 2, 7, 2], "two of 2 2 4 5 | 7 9 9 9"
    assert kept_starts(asked, known, 30) == [0] * len(asked)


def test_another_thread_runs_the_model_as_it_is() -> None:
    layer = torch.nn.Linear(2, 2)
    seen = []
    with instead(layer, lambda forward, x: forward(x) + 1):
        thread = Thread(target=lambda: seen.append(layer(torch.ones(2))))
        thread.start()
        thread.join()
        changed = layer(torch.ones(2))
    torch.testing.assert_close(seen[0] + 1, changed)
    assert "forward" not in vars(layer)

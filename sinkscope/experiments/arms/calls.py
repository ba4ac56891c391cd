"""What arms that change attention calls need of a model, and the pass that watches and changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.interface import Passed, shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.masks.lazy import lazy_masks
from sinkscope.capture.plan import INTERFACE
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Pass, Setting
from sinkscope.experiments.arms.sinks import SinkCount


def check_calls(setting: Setting) -> None:
    """Raises SinkscopeError where some attention of the model is computed in its own code: it cannot be changed."""
    for site in setting.sites:
        if site.path != INTERFACE:
            raise SinkscopeError(
                f"{site.module} computes attention in its own way: its keys and values are out of reach"
            )
        if site.cross or not site.causal:
            raise SinkscopeError(f"{site.module} is no causal self-attention: there is no cache of keys to change")


@contextmanager
def watched(forward: Pass, sinks: SinkCount) -> Iterator[None]:
    """Reads every attention call of a pass as the arm has changed it, and counts its sinks, until the block ends."""
    setting = forward.setting
    names = {module: name for name, module in setting.base.named_modules()}
    by_call = {(site.module, site.call): site for site in setting.sites}
    counts: Counter[str] = Counter()
    masks = MaskReadings()

    def attention(module: nn.Module, call: AttentionCall) -> Tensor:
        name = names.get(module)
        if name is None or not call.of_positions or name in setting.plan.unread:  # no site of the base model
            return read(masks.read(call), setting.plan.failures)[0]
        site = by_call.get((name, counts[name]))
        if site is None:
            raise SinkscopeError(f"attention module {name!r} was called more often than in the dry run")
        counts[name] += 1
        for change in forward.changes:
            call = change(site, call)
        output, sums = read(masks.read(call), setting.plan.failures)
        sinks.receive(sums)
        return output

    with shadowed(setting.model, attention, Passed(setting.plan.keywords, setting.plan.declared)), lazy_masks():
        yield

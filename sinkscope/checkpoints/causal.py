"""Whether a checkpoint is a causal language model, whose loss can be measured."""

from __future__ import annotations

from sinkscope.errors import SinkscopeError


class NotCausal(SinkscopeError):
    """The checkpoint predicts no next token."""


def need_causal(name: str, classes: list[str]) -> None:
    """Refuses classes that do not predict the next token: transformers would give them a random head without a word.

    Raises NotCausal.
    """
    from sinkscope.capture.private_doors import causal_class_names

    known = causal_class_names()
    if not any(each in known or each.endswith(("ForCausalLM", "LMHeadModel")) for each in classes):
        raise NotCausal(
            f"{name} is no causal language model ({', '.join(classes) or 'no architecture named'}): without a "
            "next-token head there is no loss to measure"
        )

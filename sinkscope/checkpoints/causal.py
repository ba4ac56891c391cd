"""Checks that a checkpoint is a causal language model, so that its loss can be measured."""

from __future__ import annotations

from sinkscope.errors import SinkscopeError


class NotCausal(SinkscopeError):
    """The checkpoint is not a causal language model: it does not predict the next token."""


def need_causal(name: str, classes: list[str]) -> None:
    """Raises NotCausal unless one of the classes predicts the next token.

    transformers would load any other class with a random next-token head and report no error.
    """
    from sinkscope.capture.private_doors import causal_class_names

    known = causal_class_names()
    if not any(each in known or each.endswith(("ForCausalLM", "LMHeadModel")) for each in classes):
        raise NotCausal(
            f"{name} is not a causal language model ({', '.join(classes) or 'no architecture named'}): without a "
            "next-token head it predicts no text"
        )

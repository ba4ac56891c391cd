"""Turns a forward pass into one LayerView for each attention call, with a replaced attention function and hooks."""

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.keywords import attention_keyword
from sinkscope.capture.plan import Plan, plan
from sinkscope.capture.scores import attention_score
from sinkscope.capture.sites import Site, not_softmax
from sinkscope.capture.view import LayerView, Missing
from sinkscope.capture.watch import Capture

__all__ = [
    "AttentionCall",
    "Capture",
    "LayerView",
    "Missing",
    "Plan",
    "Site",
    "attention_keyword",
    "attention_score",
    "not_softmax",
    "plan",
]

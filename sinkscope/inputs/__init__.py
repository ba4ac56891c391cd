"""Turns text, token files, random and repeated tokens into token ids of one length, with a fingerprint."""

from sinkscope.inputs.corpus import Corpus, read_corpus
from sinkscope.inputs.documents import check_spec
from sinkscope.inputs.rules import TokenRules, token_rules
from sinkscope.runs.passages import NothingLeft, Passage

__all__ = [
    "Corpus",
    "NothingLeft",
    "Passage",
    "TokenRules",
    "check_spec",
    "read_corpus",
    "token_rules",
]

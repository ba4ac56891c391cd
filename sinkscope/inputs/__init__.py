"""Turns text, token files, random and repeated tokens into token ids of one length, with a fingerprint."""

from sinkscope.inputs.corpus import BOS_MODES, Corpus, read_corpus
from sinkscope.inputs.documents import check_spec
from sinkscope.inputs.passages import NothingLeft, Passage
from sinkscope.inputs.rules import TokenRules, token_rules

__all__ = [
    "BOS_MODES",
    "Corpus",
    "NothingLeft",
    "Passage",
    "TokenRules",
    "check_spec",
    "read_corpus",
    "token_rules",
]

"""Text, token files, random and repeated tokens -> token ids of one length, with a fingerprint."""

from sinkscope.inputs.corpus import BOS_MODES, Corpus, TokenRules, read_corpus, token_rules
from sinkscope.inputs.documents import check_spec

__all__ = ["BOS_MODES", "Corpus", "TokenRules", "check_spec", "read_corpus", "token_rules"]

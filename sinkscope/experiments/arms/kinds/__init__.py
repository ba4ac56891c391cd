"""The kinds of arm, one a file. Importing this package declares them all."""

from sinkscope.experiments.arms.kinds import acts, dynamic, heads, keys, kv, massive, value, window

__all__ = ["acts", "dynamic", "heads", "keys", "kv", "massive", "value", "window"]

"""The kinds of arm, one a file. Importing this package declares them all."""

from sinkscope.experiments.arms.kinds import dynamic, heads, keys, kv, value, window

__all__ = ["dynamic", "heads", "keys", "kv", "value", "window"]

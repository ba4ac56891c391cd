"""The kinds of arm, one a file. Importing this package declares them all."""

from sinkscope.experiments.arms.kinds import acts, dynamic, first_token, heads, keys, kv, massive, neuron, value, window

__all__ = ["acts", "dynamic", "first_token", "heads", "keys", "kv", "massive", "neuron", "value", "window"]

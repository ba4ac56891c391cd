"""Zero the heads that a score calls dormant and see what the model loses, beside random heads."""

from sinkscope.ablation.experiment import ablate
from sinkscope.ablation.result import Ablation

__all__ = ["Ablation", "ablate"]

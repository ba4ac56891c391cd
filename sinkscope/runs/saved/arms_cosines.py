"""The table of how similar arms make tokens: after each layer, beside the unablated model and the random control."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sinkscope.runs.saved.arms_table import UNABLATED, ArmNumbers, named, versus_random
from sinkscope.runs.statistics import SIGNIFICANT, mean, paired_difference, sem

COLUMNS = (
    "arm", "layer", "control", "draws", "avg_cos_output", "avg_cos_output_sem", "change", "change_sem", "change_p",
    "versus_random", "versus_random_sem", "versus_random_p",
)  # fmt: skip


def cosine_table(measured: Sequence[ArmNumbers], controls: dict[str, str]) -> pd.DataFrame:
    """One row for each arm and layer, the draws of a random one together. The first of `measured` must be the unablated
    model, `controls` is the control's name by that of its arm; every arm must have cosines."""
    by_arm: dict[str, list[np.ndarray]] = defaultdict(list)
    for numbers in measured:
        by_arm[numbers.name] += [np.stack(list(numbers.cosines.values()), 1)]
    stacks = {name: np.stack(own) for name, own in by_arm.items()}  # draw, sequence, layer
    layers = list(measured[0].cosines)
    base = stacks[measured[0].name][0]
    rows = []
    for name, own in stacks.items():
        control = controls.get(name)
        average = own.mean(0)
        change = paired_difference(base, average)
        for place, layer in enumerate(layers):
            row = {"arm": name, "layer": layer, "control": control, "draws": len(own)}
            row |= {"avg_cos_output": float(mean(average[:, place]))}
            row |= {"avg_cos_output_sem": float(sem(average[:, place]))}
            row |= {"change": change.difference[place], "change_sem": change.sem[place], "change_p": change.p[place]}
            if control is not None:
                gap = versus_random(own[0, :, place], stacks[control][..., place])
                row |= named("versus_random", gap)
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def compared_layers(cosines: pd.DataFrame) -> pd.DataFrame:
    """One row for each arm that has a control: at how many layers its tokens are more and less similar than without it
    (`more`, `less`) and than under the control (`more_than_random`, `less_than_random`), each where p < 0.05, not
    adjusted for the number of layers; and the largest change with its layer."""
    rows = []
    for name, own in cosines[cosines["control"].notna() & (cosines["arm"] != UNABLATED)].groupby("arm", sort=False):
        row = {"arm": name, "layers": len(own)}
        for column, suffix in (("change", ""), ("versus_random", "_than_random")):
            told = own[f"{column}_p"] < SIGNIFICANT
            row |= {f"more{suffix}": int((told & (own[column] > 0)).sum())}
            row |= {f"less{suffix}": int((told & (own[column] < 0)).sum())}
        sizes = own["change"].abs()
        if sizes.notna().any():
            largest = own.loc[sizes.idxmax()]
            rows.append(row | {"layer": int(largest["layer"]), **largest[["change", "change_sem"]].to_dict()})
    return pd.DataFrame(rows)


def in_words(cosines: pd.DataFrame) -> list[str]:
    """A sentence for each arm that has a control."""
    return [
        f"{row['arm']}: tokens are more similar than in the unablated model after {row['more']} of {row['layers']} "
        f"layers and less similar after {row['less']}; more than under random ones after {row['more_than_random']}, "
        f"less after {row['less_than_random']} (cosines of pairs, each at p < 0.05)."
        for row in compared_layers(cosines).to_dict("records")
    ]

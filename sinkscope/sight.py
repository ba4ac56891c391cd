"""What a scan of pictures reads, alone or in text; and how much attention the text pays to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.errors import SinkscopeError
from sinkscope.forward import Forward
from sinkscope.inputs import token_rules
from sinkscope.inputs.batches import TokenData, batches
from sinkscope.inputs.images import processed
from sinkscope.inputs.pictures import NAMES, Pictures, picture_data, picture_rules
from sinkscope.inputs.sighted import ImageNames, Sighted, image_token, joined, sighted_data
from sinkscope.inputs.vectors import KindNames
from sinkscope.measured import Domain
from sinkscope.reading import Reading, Request, check_length
from sinkscope.statistics import mean

Shown = Pictures | Sighted


def read_pictures(request: Request, checkpoint: Checkpoint, forward: Forward) -> Shown | None:
    """The pictures asked for, with their text where the model reads both; None for text alone.

    Raises SinkscopeError for pictures given to a model that reads text, and the other way round.
    """
    name = type(checkpoint.model).__name__
    if not forward.takes_pictures and (request.images is not None or "pixel_values" in _keys(request.data)):
        raise SinkscopeError(f"{name} reads token ids, not pixel_values: it takes no pictures")
    shown = _from_folder(request, checkpoint, forward) if request.images is not None else None
    if shown is None and not forward.sees:
        shown = sighted_data(request.data, request.num_sequences, checkpoint.vocabulary)
    if shown is None:
        shown = picture_data(request.data, request.num_sequences)
    if forward.sees and shown is None:
        raise SinkscopeError(
            f"{name} reads pixel_values, not token ids (--data is for text models): give --images FOLDER, or in Python "
            'scan(model, data={"pixel_values": tensor})'
        )
    if shown is not None and not forward.sees and isinstance(shown, Pictures):
        raise SinkscopeError(f"{name} reads token ids, not pixel_values alone: give the input_ids with them")
    if shown is not None and request.seq_len is not None:
        raise SinkscopeError("--seq-len: a picture has as many positions as the model gives it")
    if isinstance(shown, Sighted):
        check_length(checkpoint, shown.tokens.longest)
    return shown


def _keys(data: Any) -> set[str]:
    return set(data.keys()) if hasattr(data, "keys") else set()


def _from_folder(request: Request, checkpoint: Checkpoint, forward: Forward) -> Shown | None:
    assert request.images is not None
    given = processed(request.images, request.prompt, request.num_sequences, checkpoint.origin, forward.sees)
    if isinstance(given, list):
        return joined(given, checkpoint.vocabulary)
    return picture_data(given, None)


def probe_of(shown: Shown, checkpoint: Checkpoint) -> tuple[Tensor, dict[str, Tensor]]:
    """One picture, or one sequence with its picture, for the dry run; and what else the model takes with it."""
    if isinstance(shown, Pictures):
        return shown.probe().to(checkpoint.device), {}
    batch = next(batches(shown.tokens, 0, 1, checkpoint.device))
    return batch.inputs, batch.extra


def show(shown: Shown, checkpoint: Checkpoint, positions: int) -> Reading:
    """Pictures in the place of sequences, of as many positions as the model's attention has; or text with pictures."""
    if isinstance(shown, Pictures):
        corpus = shown.corpus(positions)
        tokens = TokenData(corpus.ids, vectors=corpus.vectors)
        return Reading(picture_rules(), [corpus], [tokens], KindNames(NAMES))
    image = image_token(checkpoint.model.config)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    return Reading(rules, [shown.corpus()], [shown.tokens], ImageNames(checkpoint.tokenizer, image), image)


def image_tokens(domain: Domain, sites: list[Site], image_id: int | None) -> dict[str, Any] | None:
    """Attention mass on image tokens, mean over all queries, of each text head: summed from alpha_k (T - k) / T.

    None where no sequence has image tokens, or sequences have them in different places: a sum over positions' means
    would then mix them with words. `uniform`: the mass a causal head gives that attends to all keys alike.
    """
    places = domain.ids == image_id
    if not places.any() or (places != places[0]).any() or (domain.ids < 0).any():
        return None
    keys = np.flatnonzero(places[0])
    length = domain.ids.shape[1]
    heads: list[list[float | int]] = []
    causal = True
    for site in sites:
        values = domain.sites[site.name]
        if site.stream != "text" or values.keys != length:
            continue
        columns = column_sums(values.alpha, values.queries, values.causal)
        causal &= values.causal
        heads += [[site.layer, head, float(mass)] for head, mass in enumerate(columns[:, keys].sum(1) / length)]
    seen = np.cumsum(places[0]) / np.arange(1, length + 1)
    return {
        "id": image_id,
        "positions": [int(keys[0]), int(keys[-1])],
        "count": len(keys),
        "uniform": float(seen.mean()) if causal else None,
        "mean_mass": float(mean(np.array([mass for *_, mass in heads]))),
        "heads": heads,
    }


def column_sums(alpha: np.ndarray, queries: int, causal: bool) -> np.ndarray:
    """Column sums of A from alpha_k, [H, K]."""
    rows = np.arange(queries, queries - alpha.shape[1], -1) if causal else queries
    return np.asarray(alpha * rows)

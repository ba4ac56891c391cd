"""A run made by hand, of few values: what its screens show can be written out in a test."""

from __future__ import annotations

import pandas as pd

from sinkscope.runs.run import Run
from sinkscope.runs.schema.manifest import DomainFacts, FirstToken, Manifest, ModelFacts
from sinkscope.runs.schema.stream import Average, DormantHeads, MassiveActivations, PrefixValues, StreamSummary
from sinkscope.runs.schema.summary import Summary


def make_run(heads: int = 3, token: str = "<s>", domains: tuple[str, ...] = ()) -> Run:
    """Two layers; head h of layer l has BOS mass (l + h / heads) / 2."""
    rows = [
        {
            "stream": "text", "layer": layer, "head": head, "module": f"layers.{layer}.attn",
            "kind": "sliding:16" if layer else "full", "bos_mass": (layer + head / heads) / 2, "bos_mass_sem": 0.01,
            "sink_score": (layer + head / heads) / 2, "sink_margin": 1.5, "entropy": 0.25, "honor": 0.3 + layer,
            "pattern": "mixed", "dormant": layer == 0,
        } | ({"domain": domain} if domain else {})
        for domain in domains or ("",)
        for layer in range(2)
        for head in range(heads)
    ]  # fmt: skip
    rate = PrefixValues(T=50.0, t64=None)
    stream = StreamSummary.model_construct(
        heads=2 * heads,
        tokens_per_sequence=32,
        sink_rate_percent={"0.2": rate, "0.3": rate},
        uniform_alpha_0=PrefixValues(T=0.127, t64=None),
        sink_score=Average(mean=0.4, sem=0.01),
        dormant=DormantHeads(rule="honor<0.4", count=heads, heads=[(0, head) for head in range(heads)]),
        massive_activations=MassiveActivations(present=False, layers=[], max_abs=1.0, layer=0, position=0, channel=3),
        in_words=[f"Attention sink: 3 of {2 * heads} heads.", "No massive activation."],
    )
    first = FirstToken(id=1, text=token, distinct=1, is_bos=True)
    summary = Summary.model_construct(epsilon=0.3, first_token=first, streams={"text": stream})
    model = ModelFacts(
        id="tiny", revision=None, weights_sha256=None, tokenizer=None, parameters=2_000_000, dtype="float32",
        device="cpu", **{"class": "TinyModel"},
    )  # fmt: skip
    data = DomainFacts(domain="prose", spec="prose", fingerprint="", sequences=4, seq_len=32, bos="auto")
    manifest = Manifest.model_construct(model=model, data=[data], attention=[])
    empty = pd.DataFrame()
    return Run(pd.DataFrame(rows), empty, empty, empty, empty, summary, manifest)

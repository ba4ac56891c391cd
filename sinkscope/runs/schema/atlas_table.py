"""The table of `sinkscope atlas`: many runs side by side."""

from __future__ import annotations

from sinkscope.runs.schema.tables import STREAM, ColumnSchema, TableSchema, key, number

MASS = "probability"
HALF = "0.5"
UNLESS = "Empty where uniform attention passes the threshold too, and where attention is no softmax."

ATLAS_TABLE = TableSchema(
    "atlas", "atlas.csv", "one (run, domain, stream)",
    (
        key("run", "string", "Folder of the run; its number where it has none."),
        key("model", "string", "Hub id, folder or example:NAME, with the adapter it was measured with."),
        key("text", "string", "The domain: a SPEC, or a SPEC with a BOS mode."), STREAM,
    ),
    own=(
        ColumnSchema("parameters", "integer", "parameters", "[0, inf)", "Parameters of the model."),
        key("dtype", "string", "The dtype that the model computed in."),
        ColumnSchema("tokens", "integer", "tokens", "[1, inf)", "Queries of the longest sequence, T."),
        ColumnSchema("sequences", "integer", "sequences", "[1, inf)", "Sequences that were measured."),
        key("first_token", "string", "The first token of the sequences; empty where it differs."),
        ColumnSchema("layers", "integer", "layers", "[1, inf)", "Attention calls of the stream."),
        ColumnSchema("heads", "integer", "heads", "[1, inf)", "Query heads over all layers."),
        key("attention", "string", "softmax, or the other scores whose rows are no distribution."),
        number("sink_rate", "%", "[0, 100]", f"Share of (sequence, head) with alpha_0 > 0.3. {UNLESS}"),
        number("sink_rate_64", "%", "[0, 100]", f"The same over the first 64 queries. {UNLESS}"),
        number("sink_rate_0.8", "%", "[0, 100]", f"Share of (sequence, head) with alpha_0 > 0.8. {UNLESS}"),
        number("uniform_alpha_0", MASS, "[0, 1]", "alpha_0 of uniform attention, mean over heads and sequences."),
        number("alpha_0", MASS, "[0, 1]", "sink_score, mean over heads and sequences. Empty without softmax."),
        number("alpha_0_sem", MASS, "[0, inf)", "Standard error of alpha_0 over sequences."),
        number("bos_mass", MASS, "[0, 1]", "bos_mass, mean over heads and sequences. Empty without softmax."),
        number("bos_mass_sem", MASS, "[0, inf)", "Standard error of bos_mass over sequences."),
        number("heads_over_half", "share", "[0, 1]", f"Share of heads with bos_mass > {HALF}. Empty without softmax."),
        key(
            "position_or_token", "string",
            "The commonest verdict of first.csv among heads with a sink on BOS, and how many have it. One for all "
            "texts of the run; only with --first or --prepend.",
        ),
        ColumnSchema(
            "spike_layer", "integer", "layer", "[0, inf)", "The layer that raises the first token's norm 5 x or more."
        ),
        number("norm_ratio", "ratio", "[0, inf)", "Norm of x_0 over the others' mean norm, in the largest layer."),
        key("massive_channels", "string", "The channels with most massive elements, most first; at most eight."),
        number("inf_norm_peak", "activation", "[0, inf)", "Largest inf_norm of any layer after the first."),
        ColumnSchema("dormant", "integer", "heads", "[0, inf)", "Heads that are dormant by the run's rule."),
        key("dormant_rule", "string", "The dormant rule."),
        number("switch_phi", "correlation", "[-1, 1]", "Mean of switch_phi over heads; only with --measure switch."),
        key("super_weights", "string", "layer.channel.neuron of each super weight; only with --measure spikes."),
        key("self_check", "string", "passed, warning, not possible or skipped."),
        ColumnSchema("warnings", "integer", "sentences", "[0, inf)", "Warnings of the run."),
        key("created", "string", "When the scan began (UTC)."),
        key("published", "string", "Published numbers that were measured alike: COLUMN VALUE UNIT (TEXT; SOURCE)."),
        key("not_comparable", "string", "Number of the model's other published numbers, by metric and by reason."),
    ),
)  # fmt: skip

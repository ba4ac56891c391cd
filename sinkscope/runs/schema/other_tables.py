"""The tables that other commands than `scan` write: those of arms, of a training, of an atlas."""

from __future__ import annotations

from sinkscope.runs.schema.table import HEAD, LAYER, STREAM, ColumnSchema, TableSchema, key, number

NATS = "nats per token"
ARM = ColumnSchema("arm", "string", "", "", "The arm, in the grammar that docs/commands/arms.md lists.")

NUMBERS = {
    "loss": (
        NATS, "[0, inf)",
        "Next-token cross-entropy of the text: mean over positions 1..T-1 (predicted from 0..T-2), then sequences.",
    ),
    "kl": (
        NATS, "[0, inf)",
        "Mean over positions 0..T-2 of sum p log(p / q); p is the unablated model's next-token distribution, q the "
        "arm's.",
    ),
    "kl_last": (NATS, "[0, inf)", "The same sum at position T-1 alone, after the whole sequence."),
    "top1": ("share", "[0, 1]", "Share of positions 0..T-2 at which both models' most probable token is the same."),
    "top5": (
        "share", "[0, 1]", "Mean share of the unablated model's five likeliest tokens that are among the arm's five."
    ),
    "sink_rate_first": ("share", "[0, 1]", "Share of (sequence, head) with alpha_0 > epsilon under the arm."),
    "sink_rate_any": (
        "share", "[0, 1]",
        "Share of (sequence, head) with alpha_k > epsilon at any key k with n_k >= n_max/4, under the arm.",
    ),
    "size": (
        "count", "[0, inf)",
        "How much of a sequence the arm touches, mean over sequences: heads zeroed or mapped, keys hidden, tokens "
        "kept (window, kv, acts), elements replaced.",
    ),
}  # fmt: skip
"""Unit, range and meaning of every measure, by its column."""

ERROR = "Its standard error over sequences (of a random arm's mean over draws)."


def _mean(name: str) -> tuple[ColumnSchema, ColumnSchema]:
    unit, span, what = NUMBERS[name]
    return (
        ColumnSchema(name, "number", unit, span, what),
        ColumnSchema(f"{name}_sem", "number", unit, "[0, inf)", ERROR),
    )


PAIRED_P = (
    "p of the two-sided paired t-test that it is 0, with one degree of freedom less than there are sequences. A "
    "difference of at most 2^-20 of the larger mean loss is rounding, and has p = 1. Any other difference that is the "
    "same in every sequence has p = 0. Empty for one sequence."
)
JOINED_P = (
    "p of the two-sided t-test that it is 0, with Satterthwaite's degrees of freedom: 1 where it is exactly 0. Empty "
    "for one sequence or one draw."
)


def _difference(
    name: str, what: str, error: str = ERROR, p: str = PAIRED_P, unit: tuple[str, str] = (NATS, "(-inf, inf)")
) -> tuple[ColumnSchema, ColumnSchema, ColumnSchema]:
    return (
        ColumnSchema(name, "number", *unit, what),
        ColumnSchema(f"{name}_sem", "number", unit[0], "[0, inf)", error),
        ColumnSchema(f"{name}_p", "number", "probability", "[0, 1]", p),
    )


ARMS_TABLES = {
    table.name: table
    for table in (
        TableSchema(
            "arms", "arms.csv", "one arm; the draws of a random one together",
            (ARM,),
            own=(
                ColumnSchema("control", "string", "", "", "The random control that this arm is compared with."),
                ColumnSchema("family", "string", "", "", "The arms that differ by the number kept alone."),
                ColumnSchema("kept", "integer", "tokens", "[0, inf)", "That number."),
                ColumnSchema("draws", "integer", "count", "[1, inf)", "Draws of a random arm; 1 for any other."),
                ColumnSchema("size", "number", *NUMBERS["size"]),
                *_mean("loss"),
                *_difference("increase", "Loss minus the unablated model's on the same sequence: paired t-test."),
                *_difference(
                    "versus_random", "Loss minus the mean loss of the control's draws, paired by sequence.",
                    "Root of the sum of the squared errors over sequences and over draws' means.", JOINED_P,
                ),
                ColumnSchema("spread", "number", NATS, "[0, inf)", "Standard deviation of the draws' mean losses."),
                *(
                    column
                    for name in ("kl", "kl_last", "top1", "top5", "sink_rate_first", "sink_rate_any")
                    for column in _mean(name)
                ),
                ColumnSchema(
                    "destroyed", "boolean", "", "",
                    "The increase exceeds log 10: the perplexity is more than 10 times the unablated model's.",
                ),
                *_difference(
                    "d_sink", "Loss of an acts arm minus its loss with the sinks kept in 16 bits, paired by sequence."
                ),
                ColumnSchema("d_sink_low", "number", NATS, "(-inf, inf)", "Lower end of its 95 % interval."),
                ColumnSchema("d_sink_high", "number", NATS, "(-inf, inf)", "Upper end of its 95 % interval."),
                ColumnSchema(
                    "knee", "boolean", "", "",
                    "The least number kept in its family whose increase is at most the family's lowest plus its error.",
                ),
            ),
        ),
        TableSchema(
            "arm_sequences", "arm_sequences.csv", "one (arm, draw, sequence)",
            (
                ARM, ColumnSchema("draw", "integer", "", "[0, inf)", "Number of the draw; empty if not random."),
                ColumnSchema("sequence", "integer", "", "[0, inf)", "Number of the sequence."),
                ColumnSchema("document", "string", "", "", "Names of the documents it was read from."),
            ),
            own=tuple(ColumnSchema(name, "number", *about) for name, about in NUMBERS.items()),
        ),
        TableSchema(
            "arm_cosines", "arm_cosines.csv", "one (arm, layer), with --cosines",
            (ARM, LAYER),
            own=(
                ColumnSchema("control", "string", "", "", "The random control that this arm is compared with."),
                ColumnSchema("draws", "integer", "count", "[1, inf)", "Draws of a random arm; 1 for any other."),
                ColumnSchema(
                    "avg_cos_output", "number", "cosine", "[-1, 1]",
                    "Mean over unordered pairs i != j, both >= 1, of cos(e_i, e_j) under the arm, then over sequences; "
                    "e is what the layer returns, as in layers.csv. Empty for fewer than three tokens.",
                ),
                ColumnSchema("avg_cos_output_sem", "number", "cosine", "[0, inf)", ERROR),
                *_difference(
                    "change", "avg_cos_output minus the unablated model's on the same sequence: paired t-test.",
                    p=PAIRED_P.replace("loss", "cosine"), unit=("cosine", "[-2, 2]"),
                ),
                *_difference(
                    "versus_random", "avg_cos_output minus its mean over the control's draws, paired by sequence.",
                    "Root of the sum of the squared errors over sequences and over draws' means.", JOINED_P,
                    ("cosine", "[-2, 2]"),
                ),
            ),
        ),
    )
}  # fmt: skip
"""Every table of arms, by name."""


DOMAIN = ColumnSchema("domain", "string", "", "", "The domain: a SPEC, or a SPEC with a BOS mode.")

TRAINING_TABLES = {
    table.name: table
    for table in (
        TableSchema(
            "trajectory", "trajectory.csv", "one number of one training step",
            (
                ColumnSchema("step", "integer", "steps", "[0, inf)", "Training steps before the measurement."), DOMAIN,
                STREAM, ColumnSchema("level", "string", "", "", "model, layer or head: what the number is of."), LAYER,
                HEAD,
                ColumnSchema(
                    "metric", "string", "", "",
                    "heads: sink_score, bos_mass, entropy; layers: mean_bos_mass, norm_ratio, inf_norm; model: "
                    "sink_rate (percent, at the run's epsilon), bos_mass, sink_score, entropy, dormant (heads).",
                ),
            ),
            own=(
                ColumnSchema("value", "number", "", "", "The number, as the run of that step holds it."),
                ColumnSchema("sem", "number", "", "[0, inf)", "Its standard error over sequences; empty without one."),
            ),
        ),
        TableSchema(
            "emergence", "emergence.csv", "one (stream, layer, head): when its sink appeared",
            (DOMAIN, STREAM, LAYER, HEAD),
            own=(
                ColumnSchema("first", "number", "probability", "[0, 1]", "sink_score at the first step."),
                ColumnSchema("last", "number", "probability", "[0, 1]", "sink_score at the last step."),
                ColumnSchema(
                    "emerged", "integer", "steps", "[0, inf)",
                    "The first step from which on sink_score exceeds epsilon at every later step; empty, as are the "
                    "columns after it, where it does not at the last one.",
                ),
                ColumnSchema(
                    "half_rise", "integer", "steps", "[0, inf)",
                    "The first step from which on sink_score stays at or above the middle between first and last.",
                ),
                ColumnSchema(
                    "largest_gain", "number", "share", "[0, inf)",
                    "The steepest interval between two measured steps, as a share of last - first.",
                ),
                ColumnSchema(
                    "shape", "string", "", "",
                    "start: the sink was there at the first step; jump: largest_gain is 0.8 or more; ramp: less.",
                ),
            ),
        ),
    )
}  # fmt: skip
"""Every table of a training, by name. Steps are those that were measured: what lies between is not seen."""


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
        key("attention", "string", "softmax, or the names of other scores."),
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

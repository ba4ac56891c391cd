"""The tables that other commands than `scan` write: those of arms, of a training, of an atlas."""

from __future__ import annotations

from sinkscope.runs.schema.table import HEAD, LAYER, STREAM, ColumnSchema, TableSchema, key, number

NATS = "nats per token"
ARM = ColumnSchema("arm", "string", "", "", "The arm, in the grammar that docs/commands/arms.md lists.")

UNSEEN = "Empty where attention is no softmax, runs between sequences, or is computed in the model's own code."

NUMBERS = {
    "loss": (
        NATS, "[0, inf)",
        "Next-token cross-entropy of the text: mean over the tokens at positions 1..T-1.",
    ),
    "kl": (
        NATS, "[0, inf)",
        "KL divergence, sum p log(p / q): p is the unablated model's distribution of the next token, q that under the "
        "arm. Mean over positions 0..T-2. Below 1e-6 it is rounding.",
    ),
    "kl_last": (NATS, "[0, inf)", "kl at position T-1 alone, after the whole sequence."),
    "top1": ("share", "[0, 1]", "Share of positions 0..T-2 at which the most probable next token is that of the "
        "unablated model."),
    "top5": (
        "share", "[0, 1]", "Share of the unablated model's five most probable next tokens that are among the five "
        "under the arm: mean over positions 0..T-2."
    ),
    "sink_rate_first": (
        "share", "[0, 1]",
        "Share of (sequence, head) pairs with alpha_0 > epsilon under the arm; epsilon is the run's, 0.3 without one. "
        f"{UNSEEN}",
    ),
    "sink_rate_any": (
        "share", "[0, 1]",
        "Share of (sequence, head) pairs with alpha_k > epsilon at any key k with n_k >= n_max/4, under the arm, with "
        "the same epsilon. n_k counts the queries that may see key k under the arm. So under a window of few keys, "
        f"where uniform attention exceeds epsilon too, it says nothing about sinks. {UNSEEN}",
    ),
    "size": (
        "count", "[0, inf)",
        "How much of the sequence the arm changes. heads, dynamic, map: the number of heads that it changes; keys, "
        "value: of positions; massive: of elements; neuron: 1; first-token: 1, or 0 where it stands there already. kv, "
        "acts: the number of tokens that it keeps in 16 bits. window: the number S of keys that it keeps beside the "
        "last W. Empty for an arm of your own that does not call `forward.touches(number)`.",
    ),
}  # fmt: skip
"""Unit, range and meaning of every measure, by its column."""

MEAN = "Mean over sequences, and over the draws of a random arm."
ERROR = "Its standard error over sequences, after the mean over draws."


def _mean(name: str) -> tuple[ColumnSchema, ColumnSchema]:
    unit, span, what = NUMBERS[name]
    return (
        ColumnSchema(name, "number", unit, span, f"{what} {MEAN}"),
        ColumnSchema(f"{name}_sem", "number", unit, "[0, inf)", ERROR),
    )


PAIRED_P = (
    "p of the two-sided paired t-test that the difference is 0, with one degree of freedom less than there are "
    "sequences. A difference of at most 2^-20 of the larger mean loss is rounding, and has p = 1. Any other difference "
    "that is the same in every sequence has p = 0. Empty for one sequence."
)
JOINED_P = (
    "p of the two-sided t-test that the difference is 0, with Satterthwaite's degrees of freedom. A difference of at "
    "most 2^-20 of the larger mean is rounding, and has p = 1. Any other difference without an error has p = 0. Empty "
    "for one sequence or one draw."
)
NOTHING = "Empty where size is 0 in every sequence of both, for example where no sequence has a sink."


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
                ColumnSchema("control", "string", "", "", "The random control that this arm is compared with. Empty "
                    "where it has none, or where that control cannot apply."),
                ColumnSchema("family", "string", "", "", "The grid that the arm belongs to, such as window:256. Its "
                    "arms differ only in the number of first tokens that they keep. Empty for all other arms."),
                ColumnSchema("kept", "integer", "tokens", "[0, inf)", "How many tokens the arm keeps: the number S of "
                    "window, the tokens that kv keeps in 16 bits. Empty for all other arms, and where the number "
                    "depends on the sequence."),
                ColumnSchema("draws", "integer", "count", "[1, inf)", "Draws of a random arm; 1 for any other."),
                ColumnSchema("size", "number", *NUMBERS["size"][:2], f"{NUMBERS['size'][2]} {MEAN}"),
                *_mean("loss"),
                *_difference("increase", "Loss minus that of the unablated model on the same sequence, mean over "
                    "sequences."),
                *_difference(
                    "versus_random", "Loss minus the mean loss of the control's draws on the same sequence, mean over "
                        f"sequences. {NOTHING}",
                    "Root of the sum of the squared errors over sequences and over draws' means.", JOINED_P,
                ),
                ColumnSchema("spread", "number", NATS, "[0, inf)", "Standard deviation over draws of their mean "
                    "losses."),
                *(
                    column
                    for name in ("kl", "kl_last", "top1", "top5", "sink_rate_first", "sink_rate_any")
                    for column in _mean(name)
                ),
                ColumnSchema(
                    "destroyed", "boolean", "", "",
                    "Whether increase exceeds log 10: the perplexity is then more than 10 times that of the unablated "
                    "model.",
                ),
                *_difference(
                    "d_sink", "Loss of an acts arm minus its loss with the sinks kept in 16 bits, on the same "
                        "sequence; mean over sequences. Empty where no sequence has a sink."
                ),
                ColumnSchema("d_sink_low", "number", NATS, "(-inf, inf)", "Lower end of its 95 % interval."),
                ColumnSchema("d_sink_high", "number", NATS, "(-inf, inf)", "Upper end of its 95 % interval."),
                ColumnSchema(
                    "knee", "boolean", "", "",
                    "Whether this is the arm of its family that keeps fewest tokens among those whose increase is at "
                    "most the lowest of the family plus its standard error. Empty in a family of one arm.",
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
                ColumnSchema("control", "string", "", "", "The random control that this arm is compared with. Empty "
                    "where it has none, or where that control cannot apply."),
                ColumnSchema("draws", "integer", "count", "[1, inf)", "Draws of a random arm; 1 for any other."),
                ColumnSchema(
                    "avg_cos_output", "number", "cosine", "[-1, 1]",
                    "Mean of cos(e_i, e_j) over all pairs of different tokens i, j >= 1 under the arm, then over "
                    "sequences. e_i is what the layer returns, as in layers.csv. Empty where T < 3.",
                ),
                ColumnSchema("avg_cos_output_sem", "number", "cosine", "[0, inf)", ERROR),
                *_difference(
                    "change", "avg_cos_output minus that of the unablated model on the same sequence, mean over "
                        "sequences.",
                    p=PAIRED_P.replace("loss", "cosine"), unit=("cosine", "[-2, 2]"),
                ),
                *_difference(
                    "versus_random", "avg_cos_output minus its mean over the control's draws on the same sequence, "
                        f"mean over sequences. {NOTHING}",
                    "Root of the sum of the squared errors over sequences and over draws' means.", JOINED_P,
                    ("cosine", "[-2, 2]"),
                ),
            ),
        ),
    )
}  # fmt: skip
"""Every table of arms, by name."""


DOMAIN = ColumnSchema("domain", "string", "", "", "The dataset: a SPEC, with its setting.")

TRAINING_TABLES = {
    table.name: table
    for table in (
        TableSchema(
            "trajectory", "trajectory.csv", "one number of one training step",
            (
                ColumnSchema("step", "integer", "steps", "[0, inf)", "Number of training steps before the "
                    "measurement."), DOMAIN,
                STREAM, ColumnSchema("level", "string", "", "", "What the number describes: model, layer or "
                    "head."), LAYER,
                HEAD,
                ColumnSchema(
                    "metric", "string", "", "",
                    "What the number is. Of a head: sink_score, bos_mass or entropy. Of a layer: mean_bos_mass, "
                    "norm_ratio or inf_norm. Of the model: sink_rate (in percent, at the run's epsilon), bos_mass, "
                    "sink_score, entropy or dormant (a number of heads).",
                ),
            ),
            own=(
                ColumnSchema("value", "number", "", "", "The number, as in the run of that step."),
                ColumnSchema("sem", "number", "", "[0, inf)", "Standard error of value over sequences. Empty where the "
                    "run has none."),
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
                    "The first measured step from which on sink_score exceeds epsilon at every step. Empty where "
                    "sink_score does not exceed it at the last step; the columns after this one are then empty too.",
                ),
                ColumnSchema(
                    "half_rise", "integer", "steps", "[0, inf)",
                    "The first measured step from which on sink_score stays at or above (first + last) / 2. Empty, as "
                    "largest_gain is, where shape is neither jump nor ramp.",
                ),
                ColumnSchema(
                    "largest_gain", "number", "share", "(0, inf)",
                    "The largest increase of sink_score between two successive measured steps, as a share of last - "
                    "first.",
                ),
                ColumnSchema(
                    "shape", "string", "", "",
                    "start: the sink was there at every step. returned: it was there at the first step, was lost and "
                    "came back. jump: largest_gain is 0.8 or more. ramp: it is less. Empty where some step has no "
                    "sink_score, or, as emerged is, where the sink is not there at the last step.",
                ),
            ),
        ),
    )
}  # fmt: skip
"""Every table of a training, by name. Steps are those that were measured: what lies between is not seen."""


MASS = "probability"
HALF = "0.5"
UNLESS = "Empty where uniform attention exceeds the threshold too, and where attention is no softmax."

ATLAS_TABLE = TableSchema(
    "atlas", "atlas.csv", "one (run, dataset, stream)",
    (
        key("run", "string", "Folder of the run, or its number where it has no folder."),
        key("model", "string", "Hub id, folder or example:NAME, with the adapter it was measured with."),
        key("text", "string", "The dataset: a SPEC, with its setting."), STREAM,
    ),
    own=(
        ColumnSchema("parameters", "integer", "parameters", "[0, inf)", "Number of parameters of the model."),
        key("dtype", "string", "The dtype that the model computed in."),
        ColumnSchema("tokens", "integer", "tokens", "[1, inf)", "T, the number of queries of the longest sequence."),
        ColumnSchema("shortest", "integer", "tokens", "[1, inf)", "The number of queries of the shortest sequence. "
            "Empty where it is not known."),
        ColumnSchema("sequences", "integer", "sequences", "[1, inf)", "Number of sequences that were measured."),
        key("first_token", "string", "The first token of the sequences. Empty where sequences differ in it."),
        ColumnSchema("layers", "integer", "layers", "[1, inf)", "Number of attention calls of the stream."),
        ColumnSchema("heads", "integer", "heads", "[1, inf)", "Number of query heads over all layers."),
        key("attention", "string", "Kind of attention: softmax, or the names of other scores."),
        number("sink_rate", "%", "[0, 100]", f"Share of (sequence, head) pairs with alpha_0 > 0.3. {UNLESS}"),
        number("sink_rate_64", "%", "[0, 100]", f"sink_rate over the first 64 queries. {UNLESS}"),
        number("sink_rate_0.8", "%", "[0, 100]", f"Share of (sequence, head) pairs with alpha_0 > 0.8. {UNLESS}"),
        number("uniform_alpha_0", MASS, "[0, 1]", "alpha_0 of uniform attention, mean over heads and sequences."),
        number("alpha_0", MASS, "[0, 1]", "sink_score, mean over heads and sequences. Empty where attention is no "
            "softmax."),
        number("alpha_0_sem", MASS, "[0, inf)", "Standard error of alpha_0 over sequences."),
        number("bos_mass", MASS, "[0, 1]", "bos_mass, mean over heads and sequences. Empty where attention is no "
            "softmax."),
        number("bos_mass_sem", MASS, "[0, inf)", "Standard error of bos_mass over sequences."),
        number(
            "heads_over_half", "share", "[0, 1]",
            f"Share of heads with bos_mass > {HALF}. Empty where attention is no softmax.",
        ),
        key(
            "position_or_token", "string",
            "The most frequent verdict of first.csv among the heads with a sink on BOS, and how many heads have it. "
            "All texts of the run have the same value. Empty without --first and --prepend.",
        ),
        ColumnSchema(
            "spike_layer", "integer", "layer", "[0, inf)", "The layer that raises the norm of the first token most, if "
                "by a factor of 5 or more."
        ),
        number("norm_ratio", "ratio", "[0, inf)", "norm_ratio of the layer in which it is largest."),
        key("massive_channels", "string", "The channels with most massive elements, at most eight, the one with most "
            "first."),
        number("inf_norm_peak", "activation", "[0, inf)", "Largest inf_norm over the layers after the first."),
        ColumnSchema("dormant", "integer", "heads", "[0, inf)", "Number of heads that are dormant by the run's rule. "
            "Empty where the rule's column is missing in every head."),
        key("dormant_rule", "string", "The dormant rule."),
        number("switch_phi", "correlation", "[-1, 1]", "Mean of switch_phi over heads. Empty without --measure "
            "switch."),
        key("super_weights", "string", "layer.channel.neuron of each super weight. Empty without --measure spikes."),
        key("self_check", "string", "Outcome of the self-check: passed, warning, not possible or skipped."),
        ColumnSchema("warnings", "integer", "sentences", "[0, inf)", "Number of warnings of the run."),
        key("created", "string", "When the scan began (UTC)."),
        key("published", "string", "Published numbers that were measured in the same way: COLUMN VALUE UNIT (TEXT; "
            "SOURCE)."),
        key("not_comparable", "string", "How many other published numbers of the model there are, by metric, and why "
            "they are not comparable."),
    ),
)  # fmt: skip

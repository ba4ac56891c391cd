"""The tables of a training: what `sinkscope track` and SinkCallback write beside run folders."""

from __future__ import annotations

from sinkscope.runs.schema.tables import HEAD, LAYER, STREAM, ColumnSchema, TableSchema

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

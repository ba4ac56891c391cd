"""Claims of Lampert et al. 2605.08453: sinks against diagonals, as switches and against oversmoothing."""

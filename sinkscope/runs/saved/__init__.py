"""What an experiment measured, as its folder holds it: interventions, ablations, timings."""

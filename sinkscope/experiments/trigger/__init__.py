"""Training models of the trigger-conditional task, and what they show of sinks."""

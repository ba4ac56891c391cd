"""Trains models of the trigger-conditional task and measures their sinks."""

"""Runs as text and figures: functions that return strings or bytes. Only the command line prints."""

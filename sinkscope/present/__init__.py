"""Runs as text: functions that return strings. Only the command line prints."""

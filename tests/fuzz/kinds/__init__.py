"""The kinds of cases: each draws one damaged input and the command that reads it."""

from kinds import commands, files, guests, interventions, questions
from kinds.declare import KINDS

__all__ = ["KINDS", "commands", "files", "guests", "interventions", "questions"]

"""Questions that a scan answers on request, one folder each: `runs.questions` says what a folder holds."""

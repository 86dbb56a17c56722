"""The engine's process: schedule, run, commit, send."""

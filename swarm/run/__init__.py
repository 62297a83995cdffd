"""Runs: signed specifications, the directory that publishes them, tasks, and the volunteer that trains a run."""

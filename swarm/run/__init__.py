"""Runs: signed specifications, the directory that publishes them, tasks, and volunteers."""

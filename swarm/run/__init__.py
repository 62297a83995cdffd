"""Runs: specifications, tasks, and the volunteer that trains one."""

"""Benchmarks of the project: ratios to hivemind, gloo and a bare transport, measured in one run on one
machine.

Run them with `python -m benchmarks`; `--help` lists the options.
"""

"""The project's figures: ratios to hivemind, gloo and a bare transport, from one run on one machine. `python
-m benchmarks --help`.
"""

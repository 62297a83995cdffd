"""The monitor: a peer that watches a run without training. It combines the published records of peers into a
view, keeps its history, and shows it.
"""

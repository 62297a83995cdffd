"""The monitor: a peer that trains nothing and watches a run. It folds the published records of peers into a
view, keeps a history of it, and shows it.
"""

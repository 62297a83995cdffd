"""A peer that trains nothing and watches a run: what peers tell is folded into a view, kept as history, and
shown.
"""

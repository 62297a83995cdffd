"""Mixture-of-experts layers whose experts are hosted by other peers: gate, search over the grid, and calls
some of which may fail.
"""

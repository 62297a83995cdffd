"""Mixture-of-experts layers whose experts live on other peers: gate, search over the grid, calls that some
experts may fail.
"""

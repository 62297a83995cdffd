"""Arithmetic on the averaged vector: how it is cut, which member reduces how much, and how values are
combined.
"""

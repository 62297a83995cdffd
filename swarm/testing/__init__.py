"""Test doubles that ship with the library: a virtual event loop, a simulated network, identities from a seed.
Only tests and benchmarks import them.
"""

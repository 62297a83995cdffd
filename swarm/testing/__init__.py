"""Fakes that ship with the library: a virtual event loop, a simulated network, identities from a seed.
Nothing but tests imports them.
"""

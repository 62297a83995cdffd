"""Averaging: matchmaking, all-reduce, the optimizer, state transfer. Users import `swarm`, which exports the
public names.
"""

"""Everything that averages: groups, all-reduce, the optimizer, state transfer. A user imports `swarm`, which
hands the public names on.
"""

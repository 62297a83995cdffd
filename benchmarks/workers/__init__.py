"""What runs in a process of its own during a benchmark, a module per contender. Some run in a peer's
environment, without swarm.
"""

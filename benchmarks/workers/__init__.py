"""Programs that run in a process of their own during a benchmark, one module per role.

Some run in another library's environment, without swarm.
"""

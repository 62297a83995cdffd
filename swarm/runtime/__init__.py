"""The runtime of a node: the network thread, the supervisor of its background tasks, and the handling of
forks.
"""

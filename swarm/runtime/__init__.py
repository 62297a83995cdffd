"""What a node runs on: the network thread, the supervisor of its background tasks, and what happens at a
fork.
"""

"""Batching and what a server remembers of calls, without I/O or clock."""

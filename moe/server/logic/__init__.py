"""Batching and the records that a server keeps of calls, without I/O or clock."""

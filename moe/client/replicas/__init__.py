"""Calls to the replicas of an expert: which one is asked first, when a second one is asked, and which ones
are avoided.
"""

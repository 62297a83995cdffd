"""Replicas of an expert: who is avoided for a while, who is asked first, and when a second one is asked as
well.
"""

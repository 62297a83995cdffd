"""Matchmaking: how peers that want to average find one another and agree on a group. It consists of presence
records, searches and the grid.
"""

"""Membership of invited runs: capabilities, invites and who is admitted. Pure: no I/O, and time is a
parameter.
"""

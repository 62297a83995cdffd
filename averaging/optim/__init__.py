"""Training one model with many peers: the optimizer, its modes, progress of the epochs, and the shared
state.
"""

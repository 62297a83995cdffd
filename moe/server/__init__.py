"""The server of experts: requests checked, batched, computed, applied once; experts saved, and averaged with
their replicas.
"""

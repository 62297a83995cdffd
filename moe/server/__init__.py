"""The server of experts: it checks, batches and computes requests, applies backward passes once, saves
experts, and averages them with their replicas.
"""

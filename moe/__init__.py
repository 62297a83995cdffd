"""Mixture-of-experts layers hosted by other peers: names, search, batching, the server, and the layers that
call it.
"""

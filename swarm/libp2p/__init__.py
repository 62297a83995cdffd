"""libp2p in addition to gRPC: a host with Noise and yamux, circuit relay, and the tunnel to peers without an
open port.

Nothing here is imported unless a peer needs it: the library that does the Noise handshake costs 0.5 s and 51
MB (docs/decisions/0040). Start reading at `host.py`; `logic/` holds the protocols without I/O.
"""

"""The protocols of libp2p that a host speaks, without I/O, clock and chance."""

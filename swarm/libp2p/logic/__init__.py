"""The libp2p protocols of a host, without I/O, clock or randomness."""

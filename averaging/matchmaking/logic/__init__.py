"""State machines and values of matchmaking, without I/O, clock or randomness of their own."""

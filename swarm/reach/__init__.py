"""How a node that nobody can call is reached: through relays, with libp2p loaded when it is needed."""

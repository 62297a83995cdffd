"""Reaching nodes that cannot be called directly: through relays, with libp2p loaded only when needed."""

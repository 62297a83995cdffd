"""Services that run matchmaking over the network."""

"""The services that run matchmaking over the network."""

"""Shared state of the swarm: a Kademlia DHT that holds signed, expiring records.

`handle` is the interface for users (`node.dht`), `service` contains everything that awaits, and `logic`
contains the protocol as state machines and pure functions.
"""

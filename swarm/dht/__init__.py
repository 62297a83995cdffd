"""The swarm's shared state: Kademlia over signed, expiring records. `service` is the way in; the rest are its
parts, most of them pure.
"""

"""The DHT's protocol as state machines and pure functions: routing, lookups, records, storage, rules."""

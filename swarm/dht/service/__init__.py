"""The DHT's services: they feed the logic with messages and time, and perform its effects."""

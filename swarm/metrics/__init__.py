"""The metrics that a trainer publishes for monitors: the record and its publisher."""

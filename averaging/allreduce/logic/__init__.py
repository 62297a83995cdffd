"""The logic of a round: one pure state machine and the pure parts that it composes."""

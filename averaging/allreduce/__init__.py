"""A round of all-reduce: streams, votes, and repairs after the loss of members."""

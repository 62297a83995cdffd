"""A round of all-reduce: streams, votes, and what is done about members that are lost."""

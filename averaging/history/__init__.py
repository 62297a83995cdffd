"""The history of a run: a chain of certificates, each of which proves that a round was committed."""

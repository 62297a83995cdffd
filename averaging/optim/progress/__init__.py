"""Progress of an epoch over the whole swarm: reports, their sums, and who collects them."""

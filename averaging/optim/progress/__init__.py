"""Progress of an epoch over the whole swarm: reports, their totals, and the tracker that collects them."""

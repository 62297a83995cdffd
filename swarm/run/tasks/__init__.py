"""Tasks that come with the package; others come as plugins (swarm.run.task)."""

"""The caller's side: one remote expert, mixtures, pipelines, and the choice among replicas."""

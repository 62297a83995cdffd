"""`swarm.Optimizer` in the training loops of other libraries: docs/howto/frameworks.md."""

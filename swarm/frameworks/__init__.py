"""The training loops of other libraries with `swarm.Optimizer`: docs/howto/frameworks.md."""

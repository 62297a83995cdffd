"""How peers form groups, as state machines and values without I/O."""

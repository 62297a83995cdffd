"""The optimizer's inside: epochs, progress, modes, and the state that moves to who joins."""

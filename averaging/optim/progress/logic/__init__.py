"""Pure logic of the progress of epochs: no I/O, time passed in."""

"""Logic of the monitor: what the records of a run amount to, without I/O or clock."""

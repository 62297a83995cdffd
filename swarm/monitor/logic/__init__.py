"""Logic of the monitor: computes views from the records of a run, without I/O or clock."""

"""Progress reports and their sums, without I/O or clock."""

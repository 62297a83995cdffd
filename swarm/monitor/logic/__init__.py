"""What a monitor makes of the records it reads, without I/O or clock."""

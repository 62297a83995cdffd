"""What the transport decides without doing any I/O. Times are seconds of a monotonic clock, passed in."""

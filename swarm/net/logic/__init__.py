"""Logic of the transport, without I/O. Times are seconds of a monotonic clock, passed in."""

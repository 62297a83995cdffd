"""The decisions of the transport, without any I/O. Times are seconds of a monotonic clock, passed in."""

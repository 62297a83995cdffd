"""Search for experts, choice among replicas, dispatch and gathering, without I/O or clock."""

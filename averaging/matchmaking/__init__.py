"""How peers that want to average find one another and agree on a group: presence, searches, the grid."""

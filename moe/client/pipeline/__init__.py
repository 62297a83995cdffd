"""Pipelines: a deep model whose stages are hosted by other peers, several peers per stage."""

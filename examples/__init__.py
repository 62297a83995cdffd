"""Small example programs."""

"""How commands show events: JSON lines, plain text, a live view."""

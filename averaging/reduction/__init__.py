"""The vector and its arithmetic: how it is cut, who reduces how much, what becomes of the members' values."""

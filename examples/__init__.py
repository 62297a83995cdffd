"""Small programs to run and change."""

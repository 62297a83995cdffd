"""What a trainer tells about itself, for those who watch the run: the record, and who publishes it."""

"""What was run, what it costs, for whom, and the book that is kept of it."""

"""A run: its public specification, the server, the silos behind their gates, and what is kept on disk."""

"""Runs: their preparation, the server, the silos behind their gates, and what is kept on disk."""

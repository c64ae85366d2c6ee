"""Statistics under differential privacy, evaluation by sums, and parts of a model that stay in a silo."""

"""A silo's head of the model."""

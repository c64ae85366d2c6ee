"""A part of the model that stays in the silo."""

"""Paillier encryption, for private weighting of small models."""

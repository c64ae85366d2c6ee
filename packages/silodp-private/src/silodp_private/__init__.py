"""Private weighting and user sampling: the aggregators select, lattice and paillier, oblivious transfer and shares."""

"""A consortium of parties on machines of their own: its public folder, keys, policies, and the courier between them."""

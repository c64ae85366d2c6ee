"""A courier over Flower: it carries signed messages between a silodp server and its silos, and knows no secrets."""

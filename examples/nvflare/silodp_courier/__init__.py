"""A courier over NVIDIA FLARE: it carries signed messages between a silodp server and its silos, without secrets."""

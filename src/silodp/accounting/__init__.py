"""Privacy accounting: events, what they cost (ε at a δ), guarantees, and the ledger of a run."""

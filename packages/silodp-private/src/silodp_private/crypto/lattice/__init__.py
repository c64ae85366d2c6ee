"""Ring-LWE encryption that adds ciphertexts, for private weighting."""

"""Messages between parties: their types, encoding, signatures, transport and durable stores."""

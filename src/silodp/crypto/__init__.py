"""Pure party state machines: bytes and integers in, bytes and integers out. They know no model and no data set."""

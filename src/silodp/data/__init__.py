"""Tables of the silos: what they hold, how they are read, allocated, loaded and fetched."""

from silodp.data.silo import Federation, SiloData

__all__ = ["Federation", "SiloData"]

"""Bytes as the content of Flower's messages; arrays are what Flower cuts into pieces, so that they may be long."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict


def wrap(body: bytes, **texts: str) -> RecordDict:
    """Return the content of a message with one byte string and some texts."""
    array = Array(dtype="uint8", shape=(len(body),), stype="bytes", data=bytes(body))
    return RecordDict({"body": ArrayRecord({"body": array}), "texts": ConfigRecord(dict(texts))})


def unwrap(content: RecordDict) -> tuple[bytes, dict[str, str]]:
    """Return the byte string and the texts of `wrap`.

    Raises:
        ValueError: it is no content of `wrap`; whoever runs a SuperNode decides what it sends.
    """
    try:
        body, texts = content["body"]["body"].data, content["texts"]
        if not isinstance(body, bytes | bytearray | memoryview):
            raise TypeError
        return body, {name: str(value) for name, value in texts.items()}
    except (LookupError, TypeError, AttributeError):
        raise ValueError("it sent something else than a parcel") from None

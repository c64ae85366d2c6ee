"""Bytes as the content of Flower's messages; arrays are what Flower cuts into pieces, so that they may be long."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict


def wrap(body: bytes, **texts: str) -> RecordDict:
    """Return the content of a message with one byte string and some texts."""
    array = Array(dtype="uint8", shape=(len(body),), stype="bytes", data=bytes(body))
    return RecordDict({"body": ArrayRecord({"body": array}), "texts": ConfigRecord(dict(texts))})


def unwrap(content: RecordDict) -> tuple[bytes, dict[str, str]]:
    """Return the byte string and the texts of `wrap`."""
    return content["body"]["body"].data, {name: str(value) for name, value in content["texts"].items()}

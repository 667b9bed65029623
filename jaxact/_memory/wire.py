"""Reading protocol buffers without their classes, which JAX does not ship.

A message is a sequence of numbered fields (protobuf.dev/programming-guides/encoding):
a varint key, number * 8 + type, then a varint (0), 8 bytes (1), a length and so many
bytes (2) or 4 bytes (5).
"""

from collections.abc import Iterator

Message = dict[int, list["int | bytes"]]
_CUT = "no protocol buffer: it ends inside a field"


def read(data: bytes) -> Message:
    """The fields of a message by number, each with its values in order.

    Raises:
      ValueError: not a message, or one that is cut off.
    """
    fields: Message = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
            if position > len(data):
                raise ValueError(_CUT)
        else:
            raise ValueError(f"no protocol buffer: a field of type {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def messages(message: Message, number: int) -> Iterator[Message]:
    """The messages in a repeated field."""
    return (read(_bytes(value)) for value in message.get(number, ()))


def message(message: Message, number: int) -> Message:
    """The message in a field; an empty one where there is none."""
    return read(_bytes(message.get(number, [b""])[-1]))


def integer(message: Message, number: int) -> int:
    """The integer in a field; 0, the default, where there is none."""
    value = message.get(number, [0])[-1]
    assert isinstance(value, int)
    return value


def integers(message: Message, number: int) -> list[int]:
    """The integers in a repeated field, packed or not."""
    found: list[int] = []
    for value in message.get(number, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        position = 0
        while position < len(value):
            element, position = _varint(value, position)
            found.append(element)
    return found


def text(message: Message, number: int) -> str:
    """The string in a field; '' where there is none."""
    return _bytes(message.get(number, [b""])[-1]).decode()


def texts(message: Message, number: int) -> list[str]:
    """The strings in a repeated field."""
    return [_bytes(value).decode() for value in message.get(number, ())]


def _bytes(value: "int | bytes") -> bytes:
    assert isinstance(value, bytes)
    return value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer in groups of 7 bits, the lowest first, and the position after it."""
    result = shift = 0
    while True:
        if position == len(data):
            raise ValueError(_CUT)
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result, position

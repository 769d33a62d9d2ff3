"""Images as clients send them in messages."""

from __future__ import annotations

import base64
import binascii

from tandem.errors import InputError
from tandem.images import FORMATS, has_known_format

_FROM_ELSEWHERE = ("http:", "https:", "file:", "s3:", "gs:", "ftp:")


def image_of_url(url: str, where: str) -> bytes:
    """The file in a data URL. `where`: the client's field. Raises InputError."""
    if url[:8].lower().startswith(_FROM_ELSEWHERE):
        raise InputError(
            f"{where}: expected a data URL: the server fetches nothing; send the file itself, as "
            "data:image/png;base64,...",
            field=where,
        )
    head, comma, text = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise InputError(
            f"{where}: expected a data URL such as data:image/png;base64,..., got {url[:40]!r}", field=where
        )
    return image_of_base64(text, where)


def image_of_base64(text: str, where: str) -> bytes:
    """Raises InputError."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: expected base64, got other text: {error}", field=where) from None
    return checked_image(data, where)


def checked_image(data: bytes, where: str) -> bytes:
    """Raises InputError."""
    if not has_known_format(data):
        raise InputError(f"{where}: expected an image in {FORMATS}, got {len(data)} bytes of another", field=where)
    return data

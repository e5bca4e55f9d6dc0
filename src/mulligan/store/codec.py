"""How a blob's bytes are kept: one leading byte for the form, then the body.

`0` the bytes themselves; `1` zstd; `2` zstd with an earlier version of the same file as its prefix. Decoding is bounded
by the size the blob is known to have, so a small body cannot unpack into a large surprise.
"""

from __future__ import annotations

import sys
import threading

from mulligan.values.faults import fault

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RAW, ZSTD, ZSTD_PREFIX = b"\0", b"\1", b"\2"

_LEVEL = 1
_WORTH_COMPRESSING_BYTES = 128
_WINDOW_LOG_MAX = 27


def pack(data: bytes) -> bytes:
    if len(data) < _WORTH_COMPRESSING_BYTES:
        return RAW + data
    packed = _deflater().compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return ZSTD + packed if len(packed) < len(data) else RAW + data


class _Deflaters(threading.local):
    """Setting up a compressor costs more than compressing a source file; each thread keeps one."""

    def __init__(self) -> None:
        self.ours = zstd.ZstdCompressor(level=_LEVEL)


_deflaters = _Deflaters()


def _deflater() -> zstd.ZstdCompressor:
    return _deflaters.ours


def pack_after(data: bytes, earlier: bytes) -> bytes:
    """Packed as a change of `earlier`, which is needed again to unpack."""
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _LEVEL,
        zstd.CompressionParameter.window_log: min((len(earlier) + len(data)).bit_length() + 1, _WINDOW_LOG_MAX),
    }
    prefix = zstd.ZstdDict(earlier, is_raw=True).as_prefix
    return ZSTD_PREFIX + zstd.ZstdCompressor(options=options, zstd_dict=prefix).compress(
        data, zstd.ZstdCompressor.FLUSH_FRAME
    )


def unpack(body: bytes, size: int, *, earlier: bytes | None = None) -> bytes:
    """The plain bytes. Raises `blob_corrupt` for anything that does not unpack to exactly `size` bytes."""
    form, packed = body[:1], body[1:]
    try:
        data = packed if form == RAW else _inflate(form, packed, size, earlier)
    except (zstd.ZstdError, EOFError, ValueError) as error:
        raise fault("blob_corrupt", f"A blob does not unpack: {error}") from None
    if len(data) != size:
        raise fault("blob_corrupt", f"A blob unpacks to {len(data)} bytes instead of {size}.")
    return data


def _inflate(form: bytes, packed: bytes, size: int, earlier: bytes | None) -> bytes:
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
    if form == ZSTD_PREFIX:
        if earlier is None:
            raise ValueError("its earlier version is missing")
        inflater = zstd.ZstdDecompressor(options=options, zstd_dict=zstd.ZstdDict(earlier, is_raw=True).as_prefix)
    elif form == ZSTD:
        inflater = zstd.ZstdDecompressor(options=options)
    else:
        raise ValueError("unknown form")
    return inflater.decompress(packed, max_length=size + 1)

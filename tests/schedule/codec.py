"""The numpy reference of the codecs: what the engine's kernels must equal bit for bit.

The formats are in docs/numbers.md, "Codecs". Arrays hold elements as in `reference`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.schedule.numbers import Array, narrowed, widened
from wancoll.collective import BLOCKS, SPARSE_BLOCK, Codec, DType
from wancoll.errors import ConfigError
from wancoll.schedule.build import takes

# What the greatest code means, and the one below it: a block with infinities or NaNs leaves the first to them.
_GREATEST = {Codec.int8: (127, 126), Codec.int4: (7, 6), Codec.fp8: (448, 416)}

_INF = np.uint32(0x7F800000)
_SIZE = np.uint32(0x7FFFFFFF)
_ROUNDS = 7  # of Philox4x32
_LINE = 64  # elements whose random words share counters


def block(codec: Codec) -> tuple[int, int]:
    """That many elements become that many bytes on the wire; (0, 0) for none."""
    return codec.block if codec else (0, 0)


def coded_bytes(codec: Codec, n: int) -> int:
    """Bytes on the wire of *n* elements that begin at a block: the last block is padded to its full size.

    Raises:
        ConfigError: codec none, whose bytes depend on the dtype.
    """
    elements, size = block(codec)
    if not elements:
        raise ConfigError(
            "codec none has no blocks", who="coded_bytes", expected=", ".join(c.name for c in BLOCKS), got=codec.name
        )
    return -(-n // elements) * size


def encode(codec: Codec, dtype: DType, x: Array, *, key: int | None = None, first: int = 0) -> Array:
    """A part of a tensor, from a block's begin on, as bytes for the wire.

    Args:
        codec: the format.
        dtype: what the elements are.
        x: shape (n,), of dtype storage(dtype).
        key: round stochastically, with random bits that depend on these 64 bits and the elements' indices; None: to
            nearest even.
        first: index of x[0] in the tensor.

    Returns:
        A uint8 array, shape (coded_bytes(codec, n),).

    Raises:
        ConfigError: *codec* does not take *dtype*.
    """
    _check(codec, dtype)
    with np.errstate(all="ignore"):
        values = widened(dtype, x).astype(np.float32)
        noise = None if key is None else random_words(key, first, x.size)
        if codec is Codec.bf16:
            return _bf16(values, noise).astype("<u2").view(np.uint8)
        rows = _rows(codec, values)
        if codec.sparse:
            return np.concatenate([np.empty(0, np.uint8), *(_sparse(codec, row) for row in rows)])
        words = None if noise is None else _rows(codec, noise)
        scale, codes = _halves(rows, words) if codec is Codec.fp16 else _codes(codec, rows, words)
        if codec is Codec.int4:
            codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        head = scale.astype("<f4").view(np.uint8).reshape(-1, 4)
        return np.concatenate([head, np.ascontiguousarray(codes).view(np.uint8)], axis=1).reshape(-1)


def decode(codec: Codec, dtype: DType, coded: Array, n: int) -> Array:
    """What *n* elements are after the wire. Any bytes mean something; NaNs come out canonical.

    Args:
        codec: the format.
        dtype: what the elements shall be.
        coded: uint8, shape (coded_bytes(codec, n),).
        n: elements.

    Returns:
        Shape (n,), of dtype storage(dtype).

    Raises:
        ConfigError: *codec* does not take *dtype*.
    """
    _check(codec, dtype)
    with np.errstate(all="ignore"):
        if codec is Codec.bf16:
            values = (coded.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            rows = coded.reshape(-1, block(codec)[1])
            if codec.sparse:
                ends = [min(n - at, SPARSE_BLOCK) for at in range(0, n, SPARSE_BLOCK)]
                parts = [_unsparse(codec, row, end) for row, end in zip(rows, ends, strict=True)]
                return narrowed(dtype, _wide(dtype, np.concatenate([np.empty(0, np.float32), *parts])[:n]))
            scale = np.ascontiguousarray(rows[:, :4]).view("<f4")
            values = _decoded(codec, scale, np.ascontiguousarray(rows[:, 4:])).reshape(-1)[:n]
        return narrowed(dtype, _wide(dtype, values))


def valid(codec: Codec, coded: Array, n: int) -> bool:
    """Whether these are *n* elements as an encoder writes them."""
    rows = coded.reshape(-1, block(codec)[1])
    ends = [min(n - at, SPARSE_BLOCK) for at in range(0, n, SPARSE_BLOCK)]
    return not codec.sparse or all(_places(codec, row, end) is not None for row, end in zip(rows, ends, strict=True))


def random_words(key: int, first: int, n: int) -> Array:
    """32 random bits for each of the elements first to first + n of a tensor: uint32, shape (n,).

    Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Word w of the
    counter 16 line + lane belongs to the element 64 line + 16 w + lane, which suits vectors of up to 16 lanes.
    """
    index = np.arange(n, dtype=np.uint64) + np.uint64(first)
    counter = index // np.uint64(_LINE) * np.uint64(16) + index % np.uint64(16)
    words = philox(key, counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32))
    return np.choose((index // np.uint64(16) % np.uint64(4)).astype(np.intp), words)


def philox(key: int, low: Array, high: Array, third: int = 0, fourth: int = 0) -> list[Array]:
    """The four output words of Philox4x32-7 for counters (low, high, third, fourth), uint32 values in uint64 arrays."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = low, high, np.full_like(low, third), np.full_like(low, fourth)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        p, q = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (q >> half) ^ c1 ^ np.uint64(k0), q & mask, (p >> half) ^ c3 ^ np.uint64(k1), p & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [word.astype(np.uint32) for word in (c0, c1, c2, c3)]


def _check(codec: Codec, dtype: DType) -> None:
    if not takes(codec, dtype):
        taken = ", ".join(d.name for d in DType if takes(codec, d)) or "another codec"
        raise ConfigError(f"codec {codec.name} does not take this dtype", expected=taken, got=dtype.name)


def _rows(codec: Codec, values: Array) -> Array:
    """One row for each block, the last one padded with zeros."""
    elements = block(codec)[0]
    return np.pad(values, (0, -values.size % elements)).reshape(-1, elements)


def _bf16(x: Array, noise: Array | None) -> Array:
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    add = np.uint32(0x7FFF) + (bits >> 16 & 1) if noise is None else noise >> 16
    rounded: Array = ((bits + add) >> 16).astype(np.uint16)
    return rounded


def _greatest(x: Array) -> Array:
    """The bits of the greatest finite magnitude of each row, shape (rows, 1)."""
    size = x.view(np.uint32) & _SIZE
    greatest: Array = np.where(size < _INF, size, np.uint32(0)).max(axis=1, keepdims=True)
    return greatest


def _halves(x: Array, noise: Array | None) -> tuple[Array, Array]:
    field = np.maximum((_greatest(x) >> 23).astype(np.int64) - 14, 1).astype(np.uint32)
    scale, inverse = (field << 23).view(np.float32), ((np.uint32(254) - field) << 23).view(np.float32)
    scaled = x * inverse
    if noise is None:
        return scale, narrowed(DType.float16, scaled).view(np.uint16).astype("<u2")
    bits = scaled.view(np.uint32)
    size = bits & _SIZE
    small = np.where(size < np.uint32(113 << 23), size, np.uint32(0)).view(np.float32) * np.float32(2**24)
    whole = np.trunc(small)
    denormal = whole.astype(np.uint32) + (_uniform(noise) < small - whole)
    normal = (size - np.uint32((127 - 15) << 23) + (noise >> 19)) >> 13
    half = np.where(size < np.uint32(113 << 23), denormal, normal)
    half = np.where(size < _INF, half, np.uint32(0x7C00)) | (bits >> 31 << 15)
    return scale, np.where(size > _INF, np.uint32(0x7E00), half).astype("<u2")


def _uniform(noise: Array) -> Array:
    """In [0, 1), 24 bits."""
    return (noise >> 8).astype(np.float32) * np.float32(2**-24)


def _codes(codec: Codec, x: Array, noise: Array | None) -> tuple[Array, Array]:
    """Scales, shape (rows, 1), negative for blocks with infinities or NaNs; codes, 8 bits, of the shape of x."""
    finite = np.isfinite(x)
    flagged = ~finite.all(axis=1, keepdims=True)
    limit, lesser = _GREATEST[codec]
    most = np.where(flagged, lesser, limit).astype(np.float32)
    greatest = _greatest(x).view(np.float32)
    scale = greatest / most
    reached = scale * most
    bits = scale.view(np.uint32) - np.isinf(reached)
    bits = bits + ((bits < 0x00800000) & (reached < greatest))
    scale = bits.astype(np.uint32).view(np.float32)
    values = np.where(finite, x, np.float32(0))
    if noise is None:
        lift = np.where(scale < np.float32(2.0**-100), np.float32(2.0**64), np.float32(1))
        inverse = np.where(scale > 0, np.float32(1) / (scale * lift), np.float32(0))
        q = values * lift * inverse
    else:
        q = values / np.where(scale > 0, scale, np.float32(1))
    codes = (_e4m3 if codec is Codec.fp8 else _whole)(q, noise, most)
    codes = np.where(np.isinf(x), np.copysign(np.float32(limit), x), codes)
    scale = np.where(flagged, -scale, scale)
    if codec is Codec.fp8:
        return scale, np.where(np.isnan(x), np.uint8(0x7F), _e4m3_bits(codes))
    return scale, np.where(np.isnan(x), np.float32(-limit - 1), codes).astype(np.int8)


def _whole(q: Array, noise: Array | None, most: Array) -> Array:
    """Whole numbers from -most to most."""
    below = np.floor(q)
    codes: Array = np.rint(q) if noise is None else below + (_uniform(noise) < q - below)
    return np.clip(codes, -most, most)


def _e4m3(q: Array, noise: Array | None, most: Array) -> Array:
    """Numbers that e4m3 has, from -most to most."""
    size = np.abs(q)
    place = np.exp2(np.maximum(np.frexp(size)[1], -5) - np.float32(4))  # 2^-9 for denormals
    places = size / place
    below = np.floor(places)
    if noise is None:
        whole = np.rint(places)
    else:
        added = (noise >> 12).astype(np.float32) * np.float32(2**-20)  # below the last place
        carried = places - below + added >= 1
        whole = below + np.where(size < np.float32(2**-6), _uniform(noise) < places - below, carried)
    signed: Array = np.copysign(np.minimum(whole * place, most), q)
    return signed


def _e4m3_bits(x: Array) -> Array:
    """The bytes of numbers that e4m3 has."""
    bits: Array = np.searchsorted(_E4M3[:0x7F], np.abs(x)).astype(np.uint8) | np.signbit(x).astype(np.uint8) << 7
    return bits


def _decoded(codec: Codec, scale: Array, body: Array) -> Array:
    """float32, shape (rows, elements of a block)."""
    if codec is Codec.fp16:
        return body.view("<f2").astype(np.float32) * scale
    codes = body.view(np.int8)
    if codec is Codec.int4:
        codes = np.stack([codes << 4, codes & np.int8(-16)], axis=2).reshape(-1, 2 * codes.shape[1]) >> 4
    limit, flagged = _GREATEST[codec][0], np.signbit(scale)
    numbers = _E4M3[codes.view(np.uint8)] if codec is Codec.fp8 else codes.astype(np.float32)
    values = numbers * np.where(flagged, -scale, scale)
    special = np.where(np.abs(numbers) == limit, np.copysign(np.float32(np.inf), numbers), values)
    special = np.where(numbers == -limit - 1, np.float32(np.nan), special)
    return np.where(flagged, special, values)


def _wide(dtype: DType, values: Array) -> Array:
    return values.astype(np.float64) if dtype is DType.float64 else values


# ---- sparse: plain loops over numbers of any size, so that nothing of the C text's packing is here ---------------


def _form(codec: Codec) -> tuple[int, int, int]:
    """Elements kept of a block, bits of each, low bits of a place."""
    kept = max(1, SPARSE_BLOCK * (codec >> 8) // 10000)
    low = 0
    while kept << (low + 1) <= SPARSE_BLOCK:
        low += 1
    return kept, codec & 127, low


def _sparse(codec: Codec, x: Array) -> Array:
    kept, bits, low = _form(codec)
    size = x.view(np.uint32) & _SIZE
    rank = np.where(size > _INF, np.uint32(0x7FC00000), size)
    places = np.sort(np.argsort(-rank.astype(np.int64), kind="stable")[:kept])
    chosen = x[places]
    if bits == 8:
        scale, codes = _codes(Codec.int8, chosen[None], None)
        head, codes = scale.astype("<f4").tobytes(), codes[0].view(np.uint8)
    else:
        head, codes = _levels(chosen)
    fields = row = 0
    for i, (place, code) in enumerate(zip(places.tolist(), codes.tolist(), strict=True)):
        fields |= (code | (place & ((1 << low) - 1)) << bits) << i * (low + bits)
        row |= 1 << (place >> low) + i
    ends = kept * (low + bits), kept + (SPARSE_BLOCK - 1 >> low)
    body = [number.to_bytes(-(-end // 8), "little") for number, end in zip((fields, row), ends, strict=True)]
    return np.frombuffer(head + b"".join(body), np.uint8)


def _levels(x: Array) -> tuple[bytes, Array]:
    """Two levels as bfloat16, and codes of two bits: the sign, and which level."""
    size = np.abs(x).astype(np.float64)
    finite = np.isfinite(size)
    if finite.all():
        upper = size > _mean(size)
        levels = [_mean(size[~upper]), _mean(size[upper])]
    else:
        upper = ~finite
        levels = [_mean(size[finite]), np.nan if np.isnan(x).any() else np.inf]
    rounded = _bf16(np.array(levels, np.float64).astype(np.float32), None)
    rounded = np.where(np.isinf(rounded.view(ml_dtypes.bfloat16)) & np.isfinite(levels), 0x7F7F, rounded)
    return rounded.astype("<u2").tobytes(), upper.astype(np.uint8) | np.signbit(x).astype(np.uint8) << 1


def _mean(x: Array) -> float:
    total = 0.0
    for value in x.tolist():
        total += value
    return total / x.size if x.size else 0.0


def _places(codec: Codec, coded: Array, end: int) -> tuple[list[int], list[int]] | None:
    """Places and codes in a block of *end* elements; None: nobody encodes this."""
    kept, bits, low = _form(codec)
    width, cut = low + bits, 4 + -(-kept * (low + bits) // 8)
    fields, row = (int.from_bytes(part.tobytes(), "little") for part in (coded[4:cut], coded[cut:]))
    lower, upper = coded[:4].view("<u2").tolist()
    if fields >> kept * width or row.bit_count() != kept:
        return None
    if bits == 2 and (lower >= 0x7F80 or (upper > 0x7F80 and upper != 0x7FC0)):
        return None
    highs = [bit - i for i, bit in enumerate(bit for bit in range(row.bit_length()) if row >> bit & 1)]
    values = [fields >> i * width & ((1 << width) - 1) for i in range(kept)]
    places = [high << low | value >> bits for high, value in zip(highs, values, strict=True)]
    if sorted(set(places)) != places or places[-1] >= max(end, kept):
        return None
    return places, [value & ((1 << bits) - 1) for value in values]


def _unsparse(codec: Codec, coded: Array, end: int) -> Array:
    x = np.zeros(SPARSE_BLOCK, np.float32)
    found = _places(codec, coded, end)
    if found is None:
        return x
    places, codes = found[0], np.array(found[1], np.uint8)
    if codec & 8:
        x[places] = _decoded(Codec.int8, coded[:4].view("<f4")[None], codes[None])[0]
    else:
        levels = (coded[:4].view("<u2").astype(np.uint32) << 16)[codes & 1]
        x[places] = (levels | codes.astype(np.uint32) >> 1 << 31).view(np.float32)
    return x


def _e4m3_numbers() -> Array:
    """What each byte means: a sign, four bits of exponent, three of mantissa; the greatest is a NaN."""
    code = np.arange(128)
    field, mantissa = code >> 3, code & 7
    size = np.where(field > 0, 8 + mantissa, mantissa) * 2.0 ** (np.maximum(field, 1) - 10)
    size[0x7F] = np.nan
    return np.concatenate([size, -size]).astype(np.float32)


_E4M3 = _e4m3_numbers()

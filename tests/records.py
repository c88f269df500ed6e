"""TLS 1.3's records by hand, so that a test can send what no honest end does: one end's handshake, then anything."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

ALERT, HANDSHAKE, DATA = 21, 22, 23
NEW_KEYS = b"\x18\0\0\x01\0"
_KINDS = {"TLS_AES_128_GCM_SHA256": (SHA256(), 32, 16), "TLS_AES_256_GCM_SHA384": (SHA384(), 48, 32)}


class ByHand:
    """Who dials.

    Args:
        context: of it; its key log is taken.
        folder: for that.
    """

    def __init__(self, context: ssl.SSLContext, folder: Path) -> None:
        self._log = folder / "keys"
        context.keylog_filename = str(self._log)
        self.came, self.leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self.came, self.leaves, server_hostname="h")
        self._secret, self._sealed = b"", 0

    def shake(self, data: bytes = b"") -> bytes:
        """What to send as the next part of the handshake."""
        self.came.write(data)
        try:
            self._tls.do_handshake()
            lines = [line.split() for line in self._log.read_text().splitlines()]
            self._secret = next(bytes.fromhex(line[2]) for line in lines if line[0] == "CLIENT_TRAFFIC_SECRET_0")
            self._log.unlink()
        except ssl.SSLWantReadError:
            pass
        return self.leaves.read()

    @property
    def done(self) -> bool:
        """Whether it is through at this end."""
        return bool(self._secret)

    def record(self, content: bytes, kind: int = DATA) -> bytes:
        """Sealed; after new keys with these."""
        cipher = self._tls.cipher()
        assert cipher is not None
        _, size, key = _KINDS[cipher[0]]
        nonce = int.from_bytes(self._derived(b"iv", 12), "big") ^ self._sealed
        header = b"\x17\x03\x03" + (len(content) + 17).to_bytes(2, "big")
        text = AESGCM(self._derived(b"key", key)).encrypt(nonce.to_bytes(12, "big"), content + bytes([kind]), header)
        self._sealed += 1
        if (content, kind) == (NEW_KEYS, HANDSHAKE):
            self._secret, self._sealed = self._derived(b"traffic upd", size), 0
        return header + text

    def _derived(self, label: bytes, size: int) -> bytes:
        """HKDF-Expand-Label"""
        cipher = self._tls.cipher()
        assert cipher is not None
        label = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
        return HKDFExpand(_KINDS[cipher[0]][0], size, info).derive(self._secret)


def in_pieces(record: bytes, size: int) -> bytes:
    """A record in clear as many, of *size* bytes each."""
    body = record[5:]
    assert len(body) == int.from_bytes(record[3:5], "big")
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(record[:3] + len(piece).to_bytes(2, "big") + piece for piece in pieces)

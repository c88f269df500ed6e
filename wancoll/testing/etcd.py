"""An etcd on loopback to break: one member, its data in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import tempfile

from wancoll.errors import ConfigError
from wancoll.process import Child, start
from wancoll.testing.ports import port_of, reserve


class Etcd(contextlib.AbstractContextManager["Etcd"]):
    """A running etcd. A context manager; it ends with this object, or with this process if it is killed.

    Args:
        binary: of etcd.
        startup_timeout: seconds for it to answer.
        ca: PEM file of an authority: it speaks https, and only with who has a certificate of that.
        cert: PEM file of its own certificate, for 127.0.0.1.
        key: PEM file of its key.

    Raises:
        ConfigError: there is no such program, or it does not come up.
    """

    def __init__(
        self, binary: str = "etcd", *, startup_timeout: float = 20.0, ca: str = "", cert: str = "", key: str = ""
    ) -> None:
        found = shutil.which(binary)
        if found is None:
            raise ConfigError("there is no etcd", who=binary, hint="Debian's package is called etcd-server")
        self._binary, self._startup_timeout = os.path.abspath(found), startup_timeout
        self._folder = tempfile.mkdtemp(prefix="wancoll-etcd-")
        self._process: Child | None = None
        self._ca, self._cert, self._key = ca, cert, key
        self._reserved = reserve(), reserve()
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"{'https' if self._ca else 'http'}://127.0.0.1:{port_of(self._reserved[0])}"

    def start(self) -> None:
        """Start it, on the ports and the data that it had; returns when it answers.

        Raises:
            ConfigError: it does not come up.
        """
        peers = f"http://127.0.0.1:{port_of(self._reserved[1])}"
        options = {
            "name": "one",
            "data-dir": os.path.join(self._folder, "data"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"one={peers}",
        }
        if self._ca:
            options |= {"trusted-ca-file": self._ca, "cert-file": self._cert, "key-file": self._key}
            options |= {"client-cert-auth": "true"}
        command = [self._binary, *(f"--{name}={value}" for name, value in options.items())]
        self._process = start("etcd", command, self._folder)
        try:
            self._process.until(self._answers, self._startup_timeout, f"an answer at {self.url}")
        except ConfigError:
            self.kill()
            raise

    def _answers(self) -> bool:
        import httpx  # of the extra that masters of an etcd need

        context = ssl.create_default_context(cafile=self._ca or None)
        if self._ca:
            context.load_cert_chain(self._cert, self._key)
        with contextlib.suppress(httpx.HTTPError):
            return '"true"' in httpx.get(f"{self.url}/health", timeout=1.0, verify=context, trust_env=False).text
        return False

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self._process is not None:
            self._process.kill()

    def pause(self) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        assert self._process is not None
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.resume()

    def close(self) -> None:
        """End it and remove its data. Idempotent."""
        self.kill()
        for one in self._reserved:
            one.close()
        shutil.rmtree(self._folder, ignore_errors=True)

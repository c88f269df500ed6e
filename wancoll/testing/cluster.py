"""A wancoll cluster on loopback whose parts can be killed, stopped, cut off and started again."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wancoll.errors import BY_NAME, ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import OwnFolder, join_address, split_address
from wancoll.net.ask import ask
from wancoll.net.listen import is_loopback_host
from wancoll.net.proof import Proof
from wancoll.process import Child, end, is_stopped, start
from wancoll.testing.network import Host, Network, inside
from wancoll.testing.ports import port_of, reserve
from wancoll.testing.processes import ClientProcess, fork_service
from wancoll.trust.folder import ADMIN_KEY, public_keys
from wancoll.trust.token import parse
from wancoll.wire import messages as m

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator

_ANSWER_TIMEOUT = 5.0  # seconds for a service to answer a question
_LOOK_SECONDS = 0.05  # between looks at who leads
_END_TIMEOUT = 2.0  # seconds between SIGTERM and SIGKILL at the end
# Of the caller's WANCOLL_*: which kernels run, and who collects votes. Others would change the cluster's options.
KEPT_VARIABLES = frozenset({"WANCOLL_CPU", "WANCOLL_VOTERS"})


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """A master and peer daemons on loopback, each a process of its own. A context manager.

    Whatever happens, the processes end with this object (or with this process, if it is killed) and its
    temporary folder is removed.

    Args:
        peers: how many daemons to start; their names are peer-0, peer-1, ...
        lanes: TCP connections per link.
        heartbeat_timeout: seconds of silence after which the master evicts.
        listen: "host:port" that master and daemons listen on; port 0 for all. "{i}" in it stands for 1 for the master
            and the first daemon, 2 for the second, ...: "127.0.0.{i}:0" gives each daemon an address of its own, as on
            machines of their own, so that all lanes share each step.
        network: where the master and each daemon run; they listen on the addresses that their hosts have there, and
            *listen* is not used. Clients run here: they only need the daemons' sockets, which are files.
        master_args: more options of `wancoll master`, each as "--option=value".
        peer_args: more options of `wancoll peer`, for every daemon, each as "--option=value"; "{i}" as in *listen*.
        env: environment variables for all processes.
        peer_env: more environment variables for single daemons, by index.
        secure: whether daemons join with a token, and all that they and the master say goes over TLS (daemons may
            announce any loopback address then); else all is in clear, also beyond loopback.
        masters: how many masters; more than one need *etcd*. A method of one takes its index.
        etcd: URLs of etcd for `wancoll master --etcd`; the masters keep their keys to themselves there.
        startup_timeout: seconds for one process to become ready.
        fork: fork services and clients from processes that have everything loaded, which is much cheaper where many are
            started; not with *network*. A script then does all its work below `if __name__ == "__main__":`, since each
            process reads it again: a program from standard input cannot fork. client() needs that in any case.
    """

    def __init__(
        self,
        peers: int = 4,
        *,
        masters: int = 1,
        etcd: str = "",
        lanes: int = 8,
        heartbeat_timeout: float = DEFAULT.heartbeat_timeout,
        listen: str = "127.0.0.1:0",
        network: Network | None = None,
        master_args: Sequence[str] = (),
        peer_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        peer_env: Mapping[int, Mapping[str, str]] | None = None,
        startup_timeout: float = 30.0,
        fork: bool = False,
        secure: bool = False,
    ) -> None:
        self._secure, self._join = secure, ""  # the token for new daemons
        self._joins: dict[int, str] = {}  # those with which they came: their receipts outlive a lost journal
        self._lanes, self._listen, self._startup_timeout = lanes, listen, startup_timeout
        self._network = network
        self._master_args = [f"--heartbeat-timeout={heartbeat_timeout}", *master_args]
        self._peer_args = list(peer_args)
        self._peer_env = {i: dict(variables) for i, variables in (peer_env or {}).items()}
        self._token = secrets.token_hex(8)
        if etcd:
            self._master_args += [f"--etcd={etcd}", f"--etcd-prefix=wancoll-{self._token}/"]
        elif masters != 1:
            raise ConfigError("several masters need etcd", who="Cluster", expected="etcd=URL", got=f"masters={masters}")
        self._env = {
            name: value
            for name, value in os.environ.items()
            if (not name.startswith("WANCOLL_") and name != "NOTIFY_SOCKET") or name in KEPT_VARIABLES
        }
        if not secure and (network is not None or not is_loopback_host(split_address(listen.format(i=1))[0])):
            self._env["WANCOLL_INSECURE"] = "true"
        self._env.update(env or {})
        self._own = OwnFolder()
        self._folder = self._own.path
        self._fork = fork and network is None
        self._lock = threading.Lock()
        self._masters: list[Child | None] = [None] * masters
        self._master_addresses = [("", 0)] * masters
        self._ports = contextlib.ExitStack()  # of the masters, kept while they are down
        self._peers: list[Child] = []
        self._names: list[str] = []
        self._extra_args: list[list[str]] = []  # of each peer, for its restart
        self._peer_addresses: list[tuple[str, int]] = []
        self._clients: list[ClientProcess] = []
        self._journals_lost = 0  # files that stand beside, for whoever looks
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        try:
            for k in range(masters):
                self.start_master(k)
            for _ in range(peers):
                self._launch(len(self._peers), self.name(len(self._peers)), [])
            for i in range(peers):
                self._await_started(i)
            self._await_known(peers)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._peers)

    # ---- what is where -------------------------------------------------------------------------------

    @property
    def master_address(self) -> tuple[str, int]:
        """(host, port) of the first master."""
        return self._master_addresses[0]

    @property
    def master_option(self) -> str:
        """All masters' addresses, as `wancoll peer --master` takes them."""
        return ",".join(join_address(*address) for address in self._master_addresses)

    def peer_address(self, i: int) -> tuple[str, int]:
        """(host, port) of peer i's data port."""
        return self._peer_addresses[i]

    def socket(self, i: int) -> str:
        """Path of peer i's client socket."""
        return os.path.join(self._folder, f"peer-{i}.sock")

    def name(self, i: int) -> str:
        """Name of peer i's daemon."""
        return self._names[i] if i < len(self._names) else f"peer-{i}"

    def pid(self, i: int) -> int:
        """Process id of peer i's daemon."""
        return self._peers[i].pid

    @property
    def master_pid(self) -> int:
        """Process id of the first master."""
        return self._running_master(0).pid

    @property
    def master_pids(self) -> list[int]:
        """Process ids of the masters; 0 for one that does not run."""
        return [master.pid if master is not None and master.running else 0 for master in self._masters]

    def running(self, i: int) -> bool:
        """Whether peer i's daemon is there; a paused one is."""
        return self._peers[i].running

    def exit_code(self, i: int) -> int | None:
        """The exit code of peer i's daemon, None while it runs; -9 after SIGKILL."""
        return self._peers[i].exit_code

    def logs(self, i: int, lines: int = 50) -> str:
        """The last lines of peer i's log."""
        return self._peers[i].log_tail(lines)

    def master_logs(self, lines: int = 50, k: int = 0) -> str:
        """The last lines of a master's log."""
        master = self._masters[k]
        return master.log_tail(lines) if master is not None else ""

    def status(self) -> m.Status:
        """What the master that leads knows, as `wancoll status` shows it."""
        return self._find_leader()[1]

    @property
    def leader(self) -> int:
        """Index of the master that leads.

        Raises:
            ConfigError: none says that it does.
        """
        return self._find_leader()[0]

    def ask_master(self, k: int) -> m.Status | m.StandsBy:
        """What one master answers to `wancoll status`.

        Raises:
            ConfigError: it does not answer.
        """
        answer = self._ask_master(k, m.StatusRequest(PROTOCOL_VERSION), f"master {k}")
        if not isinstance(answer, m.Status | m.StandsBy):
            raise ConfigError("gave no status", who=f"master {k}", got=str(answer)[:200])
        return answer

    def _find_leader(self) -> tuple[int, m.Status]:
        refusals = []
        for k, master in enumerate(self._masters):
            if master is None or not master.running or is_stopped(master.pid):
                refusals.append(f"master {k} does not run")
                continue
            answer = self.ask_master(k)
            if isinstance(answer, m.Status):
                return k, answer
            refusals.append(f"master {k} stands by")
        raise ConfigError("no master leads", who="Cluster", got="; ".join(refusals), hint="were they killed?")

    def peer_status(self, i: int) -> dict[str, Any]:
        """What peer i's daemon says of itself and its members."""
        answer = self._ask_peer(i, m.LocalStatusRequest(), f"{self.name(i)}, status")
        status: dict[str, Any] = json.loads(answer.text)
        return status

    @property
    def journal(self) -> str:
        """Path of the master's journal, which holds the event log."""
        return os.path.join(self._folder, "journal.sqlite")

    def save_logs(self, folder: str) -> None:
        """Copy what the processes wrote to their standard error, and the journal, to *folder*."""
        os.makedirs(folder, exist_ok=True)
        for path in pathlib.Path(self._folder).iterdir():
            if path.suffix == ".log" or path.name.startswith("journal"):
                shutil.copy(path, folder)

    # ---- clients -------------------------------------------------------------------------------------

    def connect(self, i: int, **options: Any) -> Communicator:
        """`wancoll.connect` to peer i's daemon; *options* are its other arguments."""
        import wancoll

        communicator = wancoll.connect(socket=self.socket(i), **options)
        self._communicators.add(communicator)
        return communicator

    def disconnect(self) -> None:
        """Close what connect() gave."""
        for communicator in list(self._communicators):
            communicator.close()

    def client(self, i: int, target: Callable[..., Any], *arguments: Any) -> ClientProcess:
        """Run `target(socket of peer i, *arguments)` in a process of its own, which can be killed and paused.

        To restart a client, kill it and call this again.
        """
        with self._lock:
            label = f"client-{len(self._clients)} of {self.name(i)}"
            client = ClientProcess(label, target, (self.socket(i), *arguments), fork=self._fork)
            self._clients.append(client)
        return client

    # ---- peers ---------------------------------------------------------------------------------------

    def add_twin(self, i: int, *extra: str) -> int:
        """Start one more daemon with the name, and a copy of the keys, of peer i; see add_peer()."""
        with self._lock:
            twin = len(self._peers)
            if self._secure:
                shutil.copytree(self._state(i), self._state(twin))
        return self.add_peer(*extra, name=self.name(i))

    def add_peer(self, *extra: str, name: str = "", env: Mapping[str, str] | None = None) -> int:
        """Start one more daemon; returns its index.

        Args:
            extra: more options of `wancoll peer`, each as "--option=value"; they replace those of the cluster.
            name: of the daemon, "" for peer-<index>.
            env: more environment variables.
        """
        with self._lock:
            i = len(self._peers)
            self._peer_env.setdefault(i, {}).update(env or {})
            self._launch(i, name or self.name(i), list(extra))
        self._await_started(i)
        return i

    def kill(self, i: int) -> None:
        """SIGKILL peer i's daemon; returns when it is gone."""
        self._peers[i].kill()

    def terminate(self, i: int) -> None:
        """SIGTERM peer i's daemon: it drains and leaves. Does not wait."""
        self._peers[i].signal(signal.SIGTERM)

    def wait(self, i: int, timeout: float = 10.0) -> int:
        """Exit code of peer i's daemon, once it has ended by itself."""
        return self._peers[i].wait(timeout)

    def pause(self, i: int) -> None:
        """SIGSTOP peer i's daemon; returns when all its threads stand still."""
        self._peers[i].pause()

    def resume(self, i: int) -> None:
        """SIGCONT peer i's daemon."""
        self._peers[i].signal(signal.SIGCONT)

    def restart_peer(self, i: int) -> None:
        """Start peer i's daemon again, under its name and socket; kills the running one first."""
        self._peers[i].kill()
        self._launch(i, self._names[i], self._extra_args[i])
        self._await_started(i)

    # ---- the master ----------------------------------------------------------------------------------

    def kill_master(self, k: int = 0) -> None:
        """SIGKILL a master; returns when it is gone."""
        self._running_master(k).kill()

    def pause_master(self, k: int = 0) -> None:
        """SIGSTOP a master; returns when all its threads stand still."""
        self._running_master(k).pause()

    def resume_master(self, k: int = 0) -> None:
        """SIGCONT a master."""
        self._running_master(k).signal(signal.SIGCONT)

    def master_running(self, k: int = 0) -> bool:
        """Whether a master is there; a paused one is."""
        master = self._masters[k]
        return master is not None and master.running

    def proof(self, k: int = 0) -> Proof | None:
        """What to ask master k with, as its admin; None: not *secure*."""
        if not self._secure:
            return None
        from wancoll.trust.keys import Key

        state = self.master_state(k)
        return Proof(Key.read(os.path.join(state, ADMIN_KEY)), public_keys(state))

    def master_state(self, k: int = 0) -> str:
        """Master k's state folder."""
        return os.path.join(self._folder, f"master-state-{k}")

    def token(self, *, uses: int = 0, seconds: float = 0.0) -> str:
        """A new token of a *secure* master: for so many daemons (0: any number) and so long (0: for ever)."""
        made = self._ask_master(
            self._to_ask(), m.MakeToken(PROTOCOL_VERSION, "peer", "", [], uses, seconds), "the master"
        )
        return str(made.made)

    def revoke(self, token: str) -> None:
        """Make a token good for nothing."""
        self._ask_master(self._to_ask(), m.RevokeToken(PROTOCOL_VERSION, parse(token).id), "the master")

    def _to_ask(self) -> int:
        """The master that leads, once one does."""
        deadline = time.monotonic() + self._startup_timeout
        while len(self._masters) > 1:
            try:
                return self.leader
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
        return 0

    def start_master(self, k: int = 0, *, lose_journal: bool = False) -> None:
        """Start a master: on a free port the first time, on the same port and journal (unless it is lost) again.

        The first time with --first; later it waits, as masters do, for members of before to report.
        """
        if self.master_running(k):
            raise ConfigError("the master runs already", who=f"master {k}", hint="kill_master() first")
        address = self._master_addresses[k]
        listen, first = (join_address(*address), []) if address[1] else (self._keep_port(), ["--first"])
        label = f"master-{k}" if k else "master"
        journal = os.path.join(self._folder, f"journal-{k}.sqlite") if k else self.journal
        if lose_journal:
            self._journals_lost += 1
            lost = f"{journal.removesuffix('.sqlite')}-lost-{self._journals_lost}.sqlite"
            for end in ("", "-wal", "-shm", ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(journal + end, lost + end)
            self._join = ""  # the master knows it no more
        arguments = ["master", f"--listen={listen}", f"--journal={journal}", *first, *self._master_args]
        if self._secure:
            arguments += ["--secure", f"--state={self.master_state(k)}", "--announce=127.0.0.0/8"]
            arguments += [f"--seal-key={self._folder}/seal.key"] if len(self._masters) > 1 else []
        master = self._masters[k] = self._start(label, arguments, {}, "master")
        self._master_addresses[k] = _dialable(master.said("ready", self._startup_timeout).split()[0])

    # ---- faults inside -------------------------------------------------------------------------------

    def cut(self, i: int, j: int) -> None:
        """Break the lanes between peers i and j, and keep them down; all processes stay alive."""
        self._arm(i, self.name(j), "cut")
        self._arm(j, self.name(i), "cut")

    def heal(self, i: int, j: int) -> None:
        """Let the lanes between peers i and j come back."""
        self._arm(i, self.name(j), "heal")
        self._arm(j, self.name(i), "heal")

    def failpoint(self, i: int, name: str, action: str) -> None:
        """Arm a failpoint of peer i's daemon; it fires once.

        Args:
            i: which daemon.
            name: on_post (a client's call was read), mid_op (an op's first bytes moved), before_done, half_done (one
                other member was told, where members commit), after_done (its vote was written to the master, or to
                all other members), before_commit (the commit is known, the client is not told), after_commit or
                on_epoch.
            action: "kill" (SIGKILL), "pause" (SIGSTOP) or "clear" (disarm).
        """
        self._arm(i, name, action)

    def master_failpoint(self, name: str, action: str, k: int = 0) -> None:
        """Arm a failpoint of master k; it fires once.

        Args:
            name: before_commit, half_commit (one member has been told), after_commit, before_epoch, half_epoch,
                after_epoch, before_persist (of numbers to the journal), before_rotation or after_rotation (the next
                key is kept, and nobody is told), store_write or store_sync (of numbers to the
                journal: nothing of them is there, or all is).
            action: "kill" (SIGKILL), "pause" (SIGSTOP) or "clear" (disarm); at store_write and store_sync also "fail":
                until it is cleared, as on a full disk.
            k: which master.
        """
        who = f"master {k}, {action} {name}"
        answer = self._ask_master(k, m.Arm(self._token, name, action), who)
        if not isinstance(answer, m.Ok):
            raise ConfigError("refused", who=who, got=str(answer)[:200])

    # ---- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close what connect() gave, end every process, also stopped ones, remove the temporary folder. Idempotent."""
        self.disconnect()
        for client in self._clients:
            client.close()
        services = [*self._peers, *(master for master in self._masters if master is not None)]
        end(services, _END_TIMEOUT)
        self._ports.close()
        self._own.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _running_master(self, k: int) -> Child:
        master = self._masters[k]
        if master is None or not master.running:
            raise ConfigError("the master does not run", who=f"master {k}", hint="start_master() first")
        return master

    def _ask_master(self, k: int, question: m.Arm | m.StatusRequest | m.MakeToken | m.RevokeToken, who: str) -> Any:
        with _answering(who), inside(self._network, "master"):
            where, proof = self._master_addresses[k], self.proof(k)
            return ask(where, question, m.FromMaster, timeout=_ANSWER_TIMEOUT, who=who, proof=proof)

    def _listen_on(self, host: Host) -> str:
        if self._network is not None:
            return join_address(self._network.address(host), 0)
        return self._listen.format(i=1 if host == "master" else host + 1)

    def _keep_port(self) -> str:
        """Where a master listens for as long as this cluster lives."""
        host, _ = split_address(self._listen_on("master"))
        with inside(self._network, "master"):
            return join_address(host, port_of(self._ports.enter_context(reserve(host))))

    def _start(self, label: str, arguments: list[str], environment: Mapping[str, str], host: Host) -> Child:
        environment = {**self._env, "WANCOLL_FAILPOINTS": self._token, **environment}
        if self._fork:
            return fork_service(label, arguments, self._folder, environment)
        place = inside(self._network, host)
        return start(label, ["wancoll", *arguments], self._folder, environment=environment, place=place)

    def _launch(self, i: int, name: str, extra: list[str]) -> None:
        options = [
            f"--master={self.master_option}",
            f"--listen={self._listen_on(i)}",
            f"--socket={self.socket(i)}",
            f"--name={name}",
            f"--lanes={self._lanes}",
            *self._keys(i),
            *(option.format(i=i + 1) for option in self._peer_args),
            *extra,
        ]
        last = {option.partition("=")[0]: option for option in options}
        of_its_own = {"XDG_STATE_HOME": self._state(i)}  # as on a machine of its own
        env = of_its_own | self._peer_env.get(i, {})
        service = self._start(f"peer-{i}", ["peer", *last.values()], env, i)
        if i < len(self._peers):
            self._peers[i] = service
        else:
            self._peers.append(service)
            self._names.append(name)
            self._extra_args.append(extra)
            self._peer_addresses.append(("", 0))

    def _keys(self, i: int) -> list[str]:
        """Options for the daemon's key and token; one that starts again needs no master for them."""
        if not self._secure:
            return []
        if i not in self._joins:
            self._join = self._join or self.token()
            self._joins[i] = self._join
        return [f"--join={self._joins[i]}", f"--state={self._state(i)}"]

    def _state(self, i: int) -> str:
        return os.path.join(self._folder, f"state-{i}")

    def _await_started(self, i: int) -> None:
        words = self._peers[i].said("started", self._startup_timeout).split()
        where = dict(word.split("=", 1) for word in words if "=" in word)
        self._peer_addresses[i] = _dialable(where["data"].split(",")[0])

    def _await_known(self, peers: int) -> None:
        """Return once a master leads and knows all daemons."""
        deadline = time.monotonic() + self._startup_timeout
        while True:
            answers = [self.ask_master(k) for k in range(len(self._masters))]
            known = max((len(answer.daemons) for answer in answers if isinstance(answer, m.Status)), default=-1)
            if known >= peers:
                return
            if time.monotonic() > deadline:
                raise ConfigError(
                    "not all daemons reached the master",
                    who="Cluster",
                    expected=f"{peers} within {self._startup_timeout:.1f} s",
                    got=f"{known}; the end of the master's log:\n{self.master_logs()}",
                )
            time.sleep(0.005)

    def _arm(self, i: int, name: str, action: str) -> None:
        self._ask_peer(i, m.Arm(self._token, name, action), f"{self.name(i)}, {action} {name}")

    def _ask_peer(self, i: int, question: m.Arm | m.LocalStatusRequest, who: str) -> Any:
        with _answering(who):
            answer = ask(self.socket(i), question, m.FromDaemon, timeout=_ANSWER_TIMEOUT, who=who)
        if isinstance(answer, m.Failure):
            kind = BY_NAME.get(answer.error, ConfigError)
            raise kind(answer.what, who=answer.who, expected=answer.expected, got=answer.got, hint=answer.hint)
        return answer


@contextlib.contextmanager
def _answering(who: str) -> Iterator[None]:
    try:
        yield
    except OSError as bad:
        raise ConfigError("does not answer", who=who, got=str(bad), hint="was it killed or paused?") from bad


def _dialable(bound: str) -> tuple[str, int]:
    """Where to dial what is bound there; all interfaces include the loopback one."""
    host, port = split_address(bound, what="a readiness line")
    return ("127.0.0.1" if host in ("", "*", "0.0.0.0", "::") else host), port

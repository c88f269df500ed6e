"""Which of several masters a daemon tries next: in turn, or at once the leader that a standby has named. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

FIRST_PAUSE = 0.05  # seconds between rounds of tries; doubles
LONGEST_PAUSE = 0.5
FIRST_PATIENCE = 0.5  # seconds for one of several masters to answer; half as much again with each round
WELCOME_PATIENCE = 2.0  # the same for a single one that was lost a moment ago, once its connection is made
HINTS_PER_ROUND = 2  # that are followed: masters that name each other must not be followed for ever


def two_masters(met: Collection[tuple[str, str]]) -> str:
    """Why masters are not one, by the address of each and what elects it; "": they are."""
    if len({by for _, by in met}) < 2:
        return ""
    told = ", ".join(f"{address} is of {by}" for address, by in met)
    if all(by.startswith("etcd ") for _, by in met):
        cure = "expected masters of one; where an etcd was made anew, start the daemons again that followed the old one"
        if any(", led there too" in by for _, by in met):
            cure = (
                "expected masters of one; etcds that were started alike have one id: give each an initial-cluster-token"
            )
        return f"masters of two etcds: {told}; {cure}"
    cure = "expected one master, or masters of one etcd; start them with --etcd, or name one alone in --master"
    return f"two masters, and nothing elects one of them: {told}; {cure}"


class Masters:
    """The masters' addresses, and how the tries have gone."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)  # "host:port" of each, at least one
        self._at = 0
        self._named = ""  # by a standby, tried now and none of the above
        self._failed = ""  # last
        self.followed = ""  # what elects the master that this daemon follows; "": none yet
        self.met: dict[str, str] = {}  # by address: what elects those that answered there
        self._begin()

    def _begin(self) -> None:
        self._tries = self._rounds = self._hints = 0
        self._pause = FIRST_PAUSE

    @property
    def address(self) -> str:
        """The master to try now, or that is connected."""
        return self._named or self.addresses[self._at]

    def patience(self, timeout: float, *, soon: bool = False, welcome: bool = False) -> float:
        """Seconds that the one at *address* has to answer: *timeout*, less where another one may answer sooner.

        *soon*: it was lost a moment ago, and the next try may reach it before the first packet of a connection, if that
        was lost, is sent again. *welcome*: the connection is made; then TCP sends again soon, and to give up is to lose
        what the master says, where its answer is only slow.
        """
        alone = len(self.addresses) == 1 and not self._named
        if alone and not soon:
            return timeout
        first = WELCOME_PATIENCE if alone and welcome else FIRST_PATIENCE
        return min(timeout, first * 1.5 ** min(self._rounds, 16))

    def welcomed(self) -> None:
        """The one at *address* leads: tries begin anew when it is lost."""
        self._begin()

    def meet(self, answers: dict[str, tuple[str, int]]) -> None:
        """All addresses were asked: *answers* has what elects the master there, and its id where it leads, or 0.

        Where two lead by the same name they are of two etcds that were started alike: those have the same id.
        """
        two = len({master for _, master in answers.values() if master}) > 1
        alike = two and len({by for by, _ in answers.values()}) == 1
        led = {at for at, (_, master) in answers.items() if alike and master and at != self.address}
        self.met = {at: f"{by}, led there too" if at in led else by for at, (by, _) in answers.items()}

    def refuses(self, elected_by: str) -> str:
        """Why the master at *address* is not followed; "": it is, from now on (R6)."""
        at, known = self.address, self.followed
        others = {where: by for where, by in self.met.items() if by != elected_by}
        lost_its_state = known.startswith("journal ") and self.met.get(at) == known  # started anew at its address
        if others and known != elected_by and not lost_its_state:
            return two_masters([(at, elected_by), *others.items()])
        self.followed = self.met[at] = elected_by
        return ""

    def failed(self, hint: str = "") -> float:
        """Choose the next try, since this one, or the connection, is over; returns the seconds to wait before it.

        *hint* is the leader in the words of the master that was tried; "" if it named none.
        """
        before, self._failed = self._failed, self.address
        if hint and hint not in (before, self._failed) and self._hints < HINTS_PER_ROUND:
            self._hints += 1
            if hint in self.addresses:
                self._at, self._named = self.addresses.index(hint), ""
            else:
                self._named = hint
            return 0.0
        self._at, self._named = (self._at + 1) % len(self.addresses), ""
        self._tries += 1
        if self._tries % len(self.addresses):
            return 0.0
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._rounds += 1
        self._hints = 0
        return pause

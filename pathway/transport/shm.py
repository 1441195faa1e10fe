"""Memory that processes of one machine share, so that bytes go from one to the other with one copy in total.

The sender (the *lender*) copies into a block of an arena that is an anonymous file in memory (memfd); the receiver (the
*borrower*) maps the arena, once, through `/proc/PID/fd/N`, and uses the block where it is, for as long as it likes:
as the memory of an array, say. When nothing refers to it any more, it is returned. Nothing has a name in any file
system, so nothing can be left behind, however a process ends: the kernel frees a memfd with the last process that has
it.

Rejected: files in /dev/shm (they outlive a SIGKILL, and containers limit them to 64 MiB); descriptors over Unix
sockets (one more connection a pair, for what /proc does without); reading the other's memory with process_vm_readv
(2 GB/s here, and forbidden by default where Yama is on); a ring through which every byte is copied twice.

Invariants
  M-1  A process lends only to one that has proved, on this very link, that it can read the lender's memory (`Beacon`):
       addresses and host names prove nothing, and a proof cannot be passed on to another link.
  M-2  Who names an arena must know its name, which has 128 random bits and is told to borrowers alone. So nobody makes
       a process map something else: not another process's arena, and no other file.
  M-3  Arenas are sealed against shrinking: a borrower never faults on memory that went away.
  M-4  A block is lent from the moment its cell on the lender's *board* names the link until the borrower clears the
       cell. The board is shared memory as well, so a return needs no message and no link. Until then nobody writes
       to the block.
  M-5  What was lent and never came to the borrower's knowledge, it clears when the link has ended and all that came
       over it was seen. What a dead borrower had, the lender takes back (a pidfd tells that it is dead).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import mmap
import os
import secrets
import select
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from pathway.errors import ProtocolError
from pathway.transport import messages as m
from pathway.transport.memory import MIB, Arena, Block, HostBytes, Pool, half_of_memory

BOARD_CELLS = 16 * 1024
"""Blocks that can be lent at once. Beyond that, data takes the socket."""

_CELL = np.dtype(np.uint32)
_SECRET_BYTES = 32
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MEMFD = "/memfd:"
_MAX_ARENA_BYTES = 1 << 46
_WRITE_BYTES = 16 * MIB


def _memory_file(purpose: str, nbytes: int) -> tuple[int, str]:
    """A new sealed memfd: (descriptor, name). The name tells an operator whose it is, and nobody can guess it (M-2)."""
    name = f"pathway-{os.getpid()}-{purpose}-{secrets.token_hex(16)}"
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor, name


def _open_memory_file(pid: int, descriptor: int, name: str, nbytes: int, *, writable: bool = False) -> int:
    """Another process's memfd. Raises `OSError` or `ProtocolError` unless it is exactly the one described."""
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    if os.readlink(path) != f"{_MEMFD}{name} (deleted)" or not name.startswith("pathway-"):
        raise ProtocolError(f"{path} is not the shared memory that was announced")  # before it is opened: M-2
    opened = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(opened).st_size != nbytes:
            raise ProtocolError(f"{path} may change its size")
    except BaseException:
        os.close(opened)
        raise
    return opened


def boot_id() -> str:
    """What this machine calls the time since it was started; another machine has another."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


class SharedArena(Arena):
    """An arena that others can map."""

    default_bytes = 1024 * MIB
    _discard_advice = mmap.MADV_REMOVE

    def __init__(self, nbytes: int) -> None:
        self.descriptor, self.name = _memory_file("arena", nbytes)
        super().__init__(mmap.mmap(self.descriptor, nbytes), 0, nbytes)

    def write(self, offset: int, part: np.ndarray[Any, Any]) -> None:
        """Copy a dense array to where there are no pages yet. The kernel does that about twice as fast as a copy into
        the mapping, which takes a fault for every page, and has it cleared first."""
        data = memoryview(part.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        while data:
            written = os.pwrite(self.descriptor, data[:_WRITE_BYTES], offset)
            data, offset = data[written:], offset + written


class _Mapped:
    """Somebody else's memory, mapped here."""

    def __init__(self, pid: int, descriptor: int, name: str, nbytes: int, *, writable: bool) -> None:
        opened = _open_memory_file(pid, descriptor, name, nbytes, writable=writable)
        try:
            self.mapping = mmap.mmap(opened, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        finally:
            os.close(opened)
        self.nbytes = nbytes


class SharedMemory:
    """One process's part in sharing: what it lends, and to whom. One for all links of the process."""

    def __init__(self, *, limit_bytes: int | None = None, **pool_settings: Any) -> None:
        limit = half_of_memory() if limit_bytes is None else limit_bytes
        self.pool = Pool(SharedArena, SharedArena.default_bytes, limit_bytes=limit, **pool_settings)
        self.boot_id = boot_id()
        self._pid = os.getpid()
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._beacon, self._beacon_name = _memory_file("beacon", _SECRET_BYTES)
        os.pwrite(self._beacon, self.secret, 0)
        self._board_file, self._board_name = _memory_file("board", BOARD_CELLS * _CELL.itemsize)
        self._board = np.frombuffer(mmap.mmap(self._board_file, BOARD_CELLS * _CELL.itemsize), _CELL)
        self._free_cells = list(range(BOARD_CELLS - 1, -1, -1))
        self._lent: dict[int, Block] = {}  # by cell
        self._links = itertools.count(1)
        self._ended: dict[int, int] = {}  # link -> pidfd of its borrower
        self._lock = threading.Lock()

    def new_link(self) -> m.ShareOffer:
        """What to tell the peer of a new link."""
        beacon = (self._beacon, self._beacon_name, _SECRET_BYTES)
        board = (self._board_file, self._board_name, BOARD_CELLS * _CELL.itemsize)
        return m.ShareOffer(self.boot_id, self._pid, beacon, board, next(self._links))

    def lend(self, link: int, nbytes: int) -> tuple[int, Block] | None:
        """(cell, block) for so many bytes, lent over `link` from now on. None: there is no room."""
        self._collect_returned()
        with self._lock:
            if not self._free_cells:
                return None
            block = self.pool.take(nbytes)
            if block is None:
                return None
            cell = self._free_cells.pop()
            self._lent[cell] = block
            self._board[cell] = link
        return cell, block

    def withdraw(self, cell: int) -> None:
        """Take back what was lent, of which the borrower was not told."""
        self._board[cell] = 0

    def trim(self) -> None:
        """Take back what was returned and what dead processes had; let go of what is kept in vain."""
        with self._lock:
            for link, process in list(self._ended.items()):
                mine = np.flatnonzero(self._board == link)
                if len(mine) == 0 or _has_ended(process):
                    self._board[mine] = 0  # M-5
                    os.close(process)
                    del self._ended[link]
        self._collect_returned()
        self.pool.trim()

    def link_ended(self, link: int, borrower: int) -> None:
        """No more is lent over `link`. `borrower` is a pidfd, which is this object's from now on."""
        with self._lock:
            self._ended[link] = borrower
        self.trim()

    @property
    def lent_bytes(self) -> int:
        """What others have of this process."""
        self._collect_returned()
        return self.pool.used_bytes

    def _collect_returned(self) -> None:
        with self._lock:
            if not self._lent:
                return
            cells = np.fromiter(self._lent, np.intp, len(self._lent))
            returned = cells[self._board[cells] == 0].tolist()
            blocks = [self._lent.pop(cell) for cell in returned]
            self._free_cells += returned
        for block in blocks:
            self.pool.give_back(block)

    def close(self) -> None:
        """End of the process's sharing: borrowers keep what they have."""
        with self._lock:
            for process in self._ended.values():
                os.close(process)
            self._ended.clear()


def _has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def _proof(secret: bytes, prover: str) -> bytes:
    """What only one that can read `secret` can say, and only `prover` says (M-1)."""
    return hashlib.blake2b(prover.encode(), key=secret, digest_size=16).digest()


class SharingLink:
    """What one link knows of shared memory, in both directions. Used in the link's thread, but for `lend`.

    `me` and `peer` are how both ends of the link call this end and the other: each must be true of no other link end
    of the cluster, and a peer must not be able to choose what it is called.
    """

    def __init__(self, memory: SharedMemory, me: str, peer: str, post: Callable[[m.Message], None]) -> None:
        self._memory = memory
        self._me = me
        self._peer = peer
        self._post = post
        self._offer = memory.new_link()
        self._link = self._offer.link
        self._told_arenas: dict[SharedArena, int] = {}
        self._borrower = -1  # pidfd of the peer
        self._their_pid = 0
        self._their_board: _Mapped | None = None
        self._their_arenas: list[_Mapped] = []
        self._their_link = 0
        self._holding: dict[int, int] = {}  # number of a loan -> its cell, for what this end has
        self._borrowed = itertools.count(1)
        self.can_lend = False
        self.is_settled = False  # whether the peer has said if it can borrow
        self.closed = False

    def open(self) -> None:
        """Ask whether the peer shares this machine's memory."""
        self._post(self._offer)

    # -- lending ------------------------------------------------------------------------------------------------------

    def lend(self, nbytes: int) -> Loan | None:
        """A block for the peer, to be filled and then sent. None where the socket has to do. Any thread."""
        if not self.can_lend:
            return None
        lent = self._memory.lend(self._link, nbytes)
        return Loan(self, *lent, nbytes) if lent is not None else None

    def _send(self, loan: Loan, transfer: int) -> None:
        arena = loan.block.arena
        assert isinstance(arena, SharedArena)
        number = self._told_arenas.get(arena)
        if number is None:
            number = self._told_arenas[arena] = len(self._told_arenas)
            self._post(m.ShareArena((arena.descriptor, arena.name, arena.nbytes)))
        self._post(m.Shared(transfer, number, loan.block.offset, loan.cell))

    def _withdraw(self, loan: Loan) -> None:
        self._memory.withdraw(loan.cell)

    # -- borrowing ----------------------------------------------------------------------------------------------------

    def received(self, message: m.Message) -> None:
        """A message about sharing, of the peer's. Raises `ProtocolError` for what no honest peer sends."""
        match message:
            case m.ShareOffer():
                self._offered(message)
            case m.ShareProof():
                proved = secrets.compare_digest(message.proof, _proof(self._memory.secret, self._peer))
                self.can_lend = proved and self._borrower >= 0
                self.is_settled = True
            case m.ShareArena():
                self._their_arenas.append(self._map(message.arena, writable=False))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not about shared memory")

    def _offered(self, offer: m.ShareOffer) -> None:
        """Prove that the peer's memory can be read here, if it can."""
        try:
            proof = self._prove(offer)
        except (OSError, ProtocolError):  # another machine's process, another user's, or one of another container
            proof = b""
        self._post(m.ShareProof(proof))

    def _prove(self, offer: m.ShareOffer) -> bytes:
        if offer.boot_id != self._memory.boot_id or not offer.boot_id or self._borrower >= 0:
            return b""
        descriptor, name, nbytes = offer.beacon
        opened = _open_memory_file(offer.pid, descriptor, name, nbytes)
        try:
            secret = os.pread(opened, _SECRET_BYTES, 0)
        finally:
            os.close(opened)
        self._their_pid, self._their_link = offer.pid, offer.link
        self._their_board = self._map(offer.board, writable=True)
        self._borrower = os.pidfd_open(offer.pid)
        return _proof(secret, self._me)

    def _map(self, described: tuple[int, str, int], *, writable: bool) -> _Mapped:
        descriptor, name, nbytes = described
        if not 0 < nbytes <= _MAX_ARENA_BYTES:
            raise ProtocolError(f"{nbytes} bytes cannot be shared")
        try:
            return _Mapped(self._their_pid, descriptor, name, nbytes, writable=writable)
        except OSError as error:
            raise ProtocolError(f"shared memory cannot be mapped: {error}") from None

    def borrow(self, message: m.Shared, nbytes: int) -> HostBytes:
        """The data of a transfer of so many bytes: read-only, and the borrower's for as long as it refers to it."""
        board = self._their_board
        if board is None or not 0 <= message.arena < len(self._their_arenas):
            raise ProtocolError("a block of an arena that was not announced")
        arena = self._their_arenas[message.arena]
        cells = np.frombuffer(board.mapping, _CELL)
        if not (0 <= message.offset <= arena.nbytes - nbytes and 0 <= message.cell < len(cells)):
            raise ProtocolError("a block that is outside of its arena")
        data = np.frombuffer(arena.mapping, np.uint8, nbytes, message.offset)
        number = next(self._borrowed)
        self._holding[number] = message.cell
        returned = functools.partial(_return, cells, message.cell, self._holding, number, os.getpid())
        weakref.finalize(data, returned).atexit = False  # the end of the process returns all (M-5)
        return data

    def close(self) -> None:
        """The link has ended, and all that came over it was seen."""
        if self.closed:
            return
        self.closed = True
        self.can_lend = False
        if self._their_board is not None:
            held = set(self._holding.values())  # before looking at the board: `_return` clears the cell first
            cells = np.frombuffer(self._their_board.mapping, _CELL)
            for cell in np.flatnonzero(cells == self._their_link).tolist():
                if cell not in held:
                    cells[cell] = 0  # M-5
        if self._borrower >= 0:
            self._memory.link_ended(self._link, self._borrower)
            self._borrower = -1


def _return(cells: np.ndarray[Any, Any], cell: int, holding: dict[int, int], number: int, pid: int) -> None:
    """Nothing here refers to the block any more. Runs wherever the last reference goes; not for a forked child."""
    if os.getpid() == pid:
        cells[cell] = 0
        holding.pop(number, None)


class Loan:
    """A block on its way to one peer: to be filled, and then sent or withdrawn."""

    __slots__ = ("block", "cell", "link", "memory")

    def __init__(self, link: SharingLink, cell: int, block: Block, nbytes: int) -> None:
        self.link = link
        self.cell = cell
        self.block = block
        self.memory = block.memory[:nbytes]

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def fill(self, part: np.ndarray[Any, Any]) -> None:
        """Put the elements of `part`, in C order, into the memory: the one copy that a transfer costs."""
        arena = self.block.arena
        if self.block.is_fresh and part.flags.c_contiguous and isinstance(arena, SharedArena):
            arena.write(self.block.offset, part)
        else:
            np.copyto(self.memory.view(part.dtype).reshape(part.shape), part)

    def send(self, transfer: int) -> None:
        """`memory` is filled, and is the data of `transfer`. In the link's thread."""
        self.link._send(self, transfer)

    def withdraw(self) -> None:
        """The block is not wanted after all. Any thread."""
        self.link._withdraw(self)

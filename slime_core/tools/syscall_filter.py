"""A filter of system calls (classic BPF for seccomp) that keeps a program to one process."""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD = 0x00010000
OTHER_TABLE = 0x40000000
"""Numbers from here are the x32 names of the same calls."""


@dataclass(frozen=True)
class Machine:
    """Numbers of a machine's system calls: `denied` make processes, namespaces, or memory of the
    kernel that counts for nobody; clone makes threads, too, and clone3 hides what it makes, so C
    libraries are sent back to clone."""

    audit: int
    clone: int
    clone3: int
    denied: tuple[int, ...]


MACHINES = {
    "x86_64": Machine(
        0xC000003E, 56, 435,
        (57, 58, 272, 308,  # fork vfork unshare setns
         29, 319, 425, 447,  # shmget memfd_create io_uring_setup memfd_secret
         68, 64, 240, 248, 249, 250, 321, 298),  # msgget semget mq_open, keys, bpf perf_event_open
    ),
    "aarch64": Machine(
        0xC00000B7, 220, 435,
        (97, 268, 194, 279, 425, 447, 186, 190, 180, 217, 218, 219, 280, 241),  # the same
    ),
}  # fmt: skip


def one_process_filter(machine: str) -> bytes:
    """The filter's program for a machine of MACHINES."""
    about = MACHINES[machine]
    refuse, absent = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, about.audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, OTHER_TABLE),
        (RETURN, 0, 0, KILL),
    ]
    for number in about.denied:
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    code += [
        (EQUAL, 0, 1, about.clone3),
        (RETURN, 0, 0, absent),
        (EQUAL, 0, 3, about.clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *one) for one in code)

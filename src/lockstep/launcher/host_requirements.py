"""What a host needs so that several processes of a job can run on it, each checked in well under a
millisecond.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from pathlib import Path

from ..errors import ConfigError

_SHM = Path("/dev/shm")
_UNREACHABLE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)


def check_shared_memory(folder: Path = _SHM) -> None:
    """Check that files can be made in /dev/shm, where multiprocessing has its semaphores.

    Args:
        folder: of POSIX shared memory; where there is none, as on macOS, nothing is checked.

    Raises:
        ConfigError: no file can be made.
    """
    if not folder.is_dir():
        return
    path = folder / f"lockstep-check-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        path.unlink()
    except FileExistsError:
        return
    except OSError as error:
        cure = (
            "Mount it writable (mount -o remount,rw /dev/shm; in a container, --tmpfs /dev/shm:rw "
            "or --shm-size=1g)."
        )
        raise ConfigError(
            str(folder),
            "a folder in which semaphores can be made",
            hint=cure,
            found=f"{error.strerror!r}",
        ) from None


def check_loopback() -> None:
    """Check that processes of this host reach each other at 127.0.0.1.

    Raises:
        ConfigError: they do not.
    """
    with closing(socket.socket()) as listener, closing(socket.socket()) as client:
        client.settimeout(5.0)
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            client.connect(listener.getsockname())
        except OSError as error:
            if error.errno in _UNREACHABLE:
                expected = "127.0.0.1 to be reachable, where the workers of this host meet"
                hint = "The loopback interface is down: `ip link set lo up` brings it up."
                raise ConfigError("lo", expected, hint=hint, found=f"{error.strerror!r}") from None

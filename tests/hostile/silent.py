"""Opens connections that say nothing, as many as it can: silent.py HOST PORT COUNT. Holds them until its input ends."""

import contextlib
import resource
import socket
import sys


def main(host, port, count):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    with contextlib.suppress(OSError):
        for _ in range(int(count)):
            held.append(socket.create_connection((host, int(port)), 10))
    print(len(held), flush=True)
    sys.stdin.read()


main(*sys.argv[1:])

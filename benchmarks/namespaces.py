"""Two machines in one: network namespaces with host names of their own, joined by a slow link.

Linux and root only. The processes share the cores of this machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """A network namespace, and its end of the link."""

    space: str
    link: str
    address: str

    def command(self, *command: str) -> tuple[str, ...]:
        """A command that runs on this machine, under its own host name."""
        named = f'hostname {self.space}; exec "$@"'
        return ("ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", named, "sh",
                *command)  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Variables for its ranks: gloo talks over the link, each rank computes in one thread."""
        return os.environ | {"GLOO_SOCKET_IFNAME": self.link, "OMP_NUM_THREADS": "1"}

    def torchrun(self, number: int, first: Machine, ranks: int, *script: str) -> tuple[str, ...]:
        """The launch of this machine's `ranks`; it is the one of that number, `first` is number 0.

        script: what torchrun starts, with its arguments.
        """
        return self.command(
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}",
            f"--nproc-per-node={ranks}", f"--master-addr={first.address}", "--master-port=29533",
            *script,
        )  # fmt: skip

    def unplug(self) -> None:
        """Takes its end of the link down: packets vanish, and no connection is closed."""
        _run("ip", "netns", "exec", self.space, "ip", "link", "set", self.link, "down")


def why_not() -> str:
    """Why there can be no such machines here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = ("ip", "tc", "unshare")
    folders = [Path(p) for p in (*os.environ.get("PATH", "").split(":"), "/sbin", "/usr/sbin")]
    missing = [t for t in tools if not any((folder / t).exists() for folder in folders)]
    if missing:
        return f"{' and '.join(missing)} (iproute2, util-linux) not found"
    name = f"seqcomp{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.decode().strip()}"
    _run("ip", "netns", "del", name)
    return ""


@contextlib.contextmanager
def two_machines(mbit: int | None = None) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, joined by a veth pair whose rate `tc tbf` limits in both directions.

    They are taken away at the end; end the processes on them before. None: no limit.
    """
    number = os.getpid()
    machines = tuple(
        Machine(f"seqcomp{number}{side}", f"sq{side}{number % 10**6}", f"10.99.0.{place}")
        for place, side in enumerate("ab", start=1)
    )
    try:
        for machine in machines:
            _run("ip", "netns", "add", machine.space)
        first, second = machines
        _run("ip", "link", "add", first.link, "type", "veth", "peer", "name", second.link)
        for machine in machines:
            _run("ip", "link", "set", machine.link, "netns", machine.space)
            inside = ("ip", "netns", "exec", machine.space)
            _run(*inside, "ip", "addr", "add", f"{machine.address}/24", "dev", machine.link)
            _run(*inside, "ip", "link", "set", machine.link, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            if mbit is not None:
                limit = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms")
                _run(*inside, "tc", "qdisc", "add", "dev", machine.link, "root", "tbf", *limit)
        yield first, second
    finally:
        for machine in machines:
            command = ["ip", "netns", "del", machine.space]
            subprocess.run(command, check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)

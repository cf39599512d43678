"""A local Ray is reachable from this machine only (C28)."""

from __future__ import annotations

import os
import subprocess
import sys

PROBE = """
import os, psutil, ray
from farhorizon.launch.cluster import cluster

with cluster(None):
    assert ray.get(ray.remote(num_cpus=0.1)(lambda: os.getpid()).remote()) != os.getpid()
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    sockets = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in ours]
    print("sockets", len(sockets))
    for c in sockets:
        if c.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1"):
            print("open", c.laddr.ip, c.laddr.port, psutil.Process(c.pid).name())
"""


def test_every_socket_of_a_local_ray_is_on_loopback() -> None:
    # A process of its own: the address is chosen when Ray starts, and other tests share one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert int(lines[0].split()[1]) >= 3
    assert [line for line in lines if line.startswith("open")] == []

"""Slurm on this machine: a controller and two nodes, without cgroups, in a folder of their own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

NODES = ("node1", "node2")

# proctrack/linuxproc and task/none work without cgroups, which a container may not change.
_CONFIGURATION = """\
ClusterName=longspan
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running cluster."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    def call(self, *words: str) -> str:
        """What a command such as `sbatch` prints."""
        done = subprocess.run(
            words,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Its fields, such as JobState=RUNNING and Restarts=0."""
        words = self.call("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start munge and Slurm, with everything they write in `folder`; end them afterwards."""
    host, ports = socket.gethostname(), _free_ports(1 + len(NODES))
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=host, port=ports[0], folder=folder, nodes="\n".join(nodes), names=",".join(NODES)
        )
    )
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        "SLURM_CONF": str(configuration),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]),
        "OMP_NUM_THREADS": "1",
    }
    cluster = Slurm(environment)
    with ExitStack() as daemons:

        def start(*words: str) -> None:
            daemons.enter_context(_daemon(words, environment))

        start("munged", "--force", "--foreground", *_munge_options(folder))
        until((folder / "munge.socket").exists, "munged does not start")
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        until(lambda: _idle_nodes(cluster) == len(NODES), f"Slurm does not start: see {folder}")
        yield cluster


def until(done: Callable[[], bool], otherwise: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, otherwise
        time.sleep(0.2)


def _idle_nodes(cluster: Slurm) -> int:
    try:
        return len(cluster.call("sinfo", "--Node", "--noheader", "--states=idle").splitlines())
    except AssertionError:  # the controller does not answer yet
        return 0


def _munge_options(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]


@contextmanager
def _daemon(words: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[None]:
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in opened]

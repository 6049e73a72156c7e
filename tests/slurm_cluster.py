"""SLURM with two nodes that are both this machine, for tests: Debian's slurmctld, slurmd, slurm-client and munge.

Needs the rights of root, as slurmd does.
"""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launches import OURS, find_free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_START_S = 60.0
_STOP_S = 15.0
# A requeued job waits as long as the credentials of its first start are good for, by default two minutes.
_CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
FirstJobId={first_job}
SchedulerParameters=sched_interval=5,batch_sched_delay=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=16 RealMemory=1024
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=1024
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def find_obstacle() -> str | None:
    """Return why there can be no cluster here; ``None`` where there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"no {missing[0]}: apt install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd needs the rights of root"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that runs.

    Args:
        folder: Of its logs.
        environ: That its commands need.
    """

    folder: Path
    environ: dict[str, str]

    def call(self, *command: str, cwd: Path | None = None, **environ: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            command, env={**self.environ, **environ}, cwd=cwd, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.read_logs()}"
        return done.stdout

    def submit(self, *options: str, cwd: Path, **environ: str) -> str:
        """Return the id of a new batch job."""
        return self.call("sbatch", "--parsable", *options, cwd=cwd, **environ).strip()

    def get_state(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` knows, such as ``JobState``, ``Restarts`` and ``ExitCode``."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, is_true: Callable[[dict[str, str]], bool], timeout_s: float = 300.0) -> dict[str, str]:
        """Wait until something is true of the state of a job, and return the state."""
        deadline = time.monotonic() + timeout_s
        while not is_true(state := self.get_state(job)):
            assert time.monotonic() < deadline, f"{state}{self.read_logs()}"
            time.sleep(0.3)
        return state

    def read_logs(self) -> str:
        """Return the last lines of what the daemons wrote."""
        logs = sorted(self.folder.glob("*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster of the nodes n1 and n2 in an empty folder; in the end, stop its jobs and daemons, no others."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    port, *ports = (find_free_port() for _ in range(3))
    # Lightning derives the port where ranks meet from the job's number: let it be one that is free here.
    first_job = find_free_port() % 10_000 or 1
    config = _CONFIG.format(
        folder=folder, user=user, port=port, ports=ports, host=socket.gethostname(), first_job=first_job
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    clean = {name: value for name, value in os.environ.items() if name not in OURS and not name.startswith("SLURM_")}
    environ = {**clean, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": _search_path()}
    cluster = Cluster(folder=folder, environ=environ)
    munge = [f"--{kind}={folder}/munge.{kind.split('-')[0]}" for kind in ("socket", "key-file", "pid-file")]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
    with ExitStack() as stack:
        stack.enter_context(_daemon(["munged", *munge], cluster))
        _wait_until((folder / "munge.socket").exists, cluster)
        stack.enter_context(_daemon(["slurmctld", "-D"], cluster))
        for node in ("n1", "n2"):
            stack.enter_context(_daemon(["slurmd", "-D", "-N", node], cluster))
        stack.callback(_cancel_all, cluster)
        _wait_until(lambda: _count_idle(cluster) == 2, cluster)
        yield cluster


@contextmanager
def _daemon(command: Sequence[str], cluster: Cluster) -> Iterator[None]:
    with (cluster.folder / f"{command[0]}.out.log").open("ab") as log:
        process = subprocess.Popen(command, env=cluster.environ, stdout=log, stderr=log, cwd=cluster.folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cancel_all(cluster: Cluster) -> None:
    """Cancel all jobs and wait until their processes are gone: they are children of no daemon."""
    cluster.call("scancel", "--partition=all")
    _wait_until(lambda: not cluster.call("squeue", "--noheader").strip(), cluster)


def _count_idle(cluster: Cluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "-N", "-o", "%T"], env=cluster.environ, text=True, capture_output=True, check=False
    )
    return done.stdout.split().count("idle")


def _wait_until(is_true: Callable[[], bool], cluster: Cluster) -> None:
    deadline = time.monotonic() + _START_S
    while not is_true():
        assert time.monotonic() < deadline, cluster.read_logs()
        time.sleep(0.1)


def _search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"

"""The files that start a trainer with engines on other hosts, and XPK's script: their commands, run
with stand-ins.
"""

import os
import re
import shlex
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from dcmdp_jax.commands import flags
from tests.support.waiting import HANGS_S, wait_until

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "examples"
_PRINT = 'printf "%s\\n" "$@" > "$SEEN/trainer"'
# Of the waiting for the other nodes, the address and how many GPUs.
_WAIT = 'if [ "$1" = -c ]; then echo "wait ${@:3}" >> "$SEEN/calls"; exit; fi\n'
# The first call that starts a node fails, as it does before the head is there.
_RAY = """echo "ray $*" >> "$SEEN/calls"
case "$1 $*" in
  health-check*)
    if [ "$SKYPILOT_NODE_RANK" = 0 ]; then grep -q -- --head "$SEEN/calls"
    else test "$(grep -c health-check "$SEEN/calls")" -le "$HEALTHY"; fi ;;
  *--head*--block*) exec /bin/sleep 60 ;;
  *--address*) test "$(grep -c -- --address=.*--block "$SEEN/calls")" -gt 1 ;;
esac"""


@pytest.fixture
def tools(tmp_path):
    """Programs that stand in for others, the environment that has them, and where they write what
    they were told.
    """

    def make(**bodies):
        for name, body in bodies.items():
            path = tmp_path / "home" / name.replace("_", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(0o755)
        home = tmp_path / "home"
        return os.environ | {
            "PATH": f"{home}:{os.environ['PATH']}",
            "HOME": str(home),
            "SEEN": str(tmp_path),
        }

    return make


def _objects(name="ray_engines_kuberay.yaml"):
    return {
        document["kind"]: document
        for document in yaml.safe_load_all((_EXAMPLES / name).read_text())
    }


def _checked(words):
    """The config of a trainer's command line, as the trainer itself reads it."""
    return flags.parse(["dcmdp train", *words]).config


def _given_in_comment(name):
    """The arguments that the first lines of a script show."""
    shown = re.search(
        r"^#.* examples/\S+ (--config=(?:.*\\\n#)*.*)", (_EXAMPLES / name).read_text(), re.M
    )[1]
    return shlex.split(shown.replace("\\\n#", " "))


def _vllm_fits(vllm, gpus):
    """Whether engines on `gpus` GPUs of other hosts are what is asked for, and one host may be
    away.
    """
    assert (vllm.placement, vllm.memory_share) == ("ray", 0.9) and vllm.python.endswith(
        "vllm/bin/python"
    )
    assert vllm.replicas * vllm.tensor_parallel_size == gpus
    assert vllm.min_replicas * vllm.tensor_parallel_size == gpus - 8


def test_the_ray_job_trains_on_the_head_and_has_its_engines_on_the_workers():
    spec = _objects()["RayJob"]["spec"]
    cluster = spec["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    program, command, *words = shlex.split(spec["entrypoint"])
    vllm = _checked(words).rollout.vllm
    assert (program, command, vllm.address) == ("dcmdp", "train", "auto")
    assert head["rayStartParams"]["num-gpus"] == "0"  # else engines share the trainer's GPUs
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    containers = [group["template"]["spec"]["containers"][0] for group in (head, workers)]
    limits = [container["resources"]["limits"] for container in containers]
    assert limits[0]["nvidia.com/gpu"] == 8
    _vllm_fits(vllm, workers["replicas"] * limits[1]["nvidia.com/gpu"])
    [mount], [volume] = containers[0]["volumeMounts"], head["template"]["spec"]["volumes"]
    assert mount["name"] == volume["name"] and all(
        f"={mount['mountPath']}/" in words[at] for at in (1, 2)
    )
    # The image has vLLM there, and one Ray in both environments, of a version that the trainer
    # takes.
    assert len({container["image"] for container in containers}) == 1
    image = (_ROOT / "Dockerfile").read_text()
    assert f"{vllm.python.removesuffix('python')}pip install" in image and "[cuda,ray,hub," in image
    assert '"ray==$(ray --version' in image
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [ray] = [wanted for wanted in map(Requirement, extras["ray"]) if wanted.name == "ray"]
    assert cluster["rayVersion"] in ray.specifier


def test_no_other_pod_reaches_rays_ports():
    objects = _objects()
    cluster = objects["RayJob"]["spec"]["rayClusterSpec"]
    policy = objects["NetworkPolicy"]["spec"]
    own = policy["podSelector"]
    templates = [
        group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    assert own["matchLabels"] and all(
        own["matchLabels"].items() <= pod["metadata"]["labels"].items() for pod in templates
    )
    each_other, operator = policy["ingress"]
    assert policy["policyTypes"] == ["Ingress"] and each_other == {"from": [{"podSelector": own}]}
    [its_pod, submitter] = operator["from"]
    assert its_pod["namespaceSelector"]["matchLabels"] and its_pod["podSelector"]["matchLabels"]
    job = {
        "ray.io/originated-from-crd": "RayJob",
        "ray.io/originated-from-cr-name": objects["RayJob"]["metadata"]["name"],
    }
    assert submitter == {"podSelector": {"matchLabels": job}}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert set(objects) == {"NetworkPolicy", "RayJob"} and cluster["authOptions"] == {
        "mode": "token"
    }
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    # The mode that waits for all pods: the trainer refuses a cluster smaller than what it asks for.
    assert objects["RayJob"]["spec"]["submissionMode"] == "K8sJobMode"
    for pod in templates:
        assert not {"hostNetwork", "hostPort"} & set(re.findall(r"\w+", str(pod)))
        assert pod["spec"]["automountServiceAccountToken"] is False


def _skypilot(tools, tmp_path, rank, **more):
    task = yaml.safe_load((_EXAMPLES / "ray_engines_skypilot.yaml").read_text())
    environment = tools(
        trainer_bin_ray=_RAY,
        trainer_bin_python=_WAIT + _PRINT + "; exit ${CODE:-0}",
        sleep="exit 0",
    ) | {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        **more,
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=environment, timeout=HANGS_S)
    return task, done.returncode, (tmp_path / "calls").read_text().splitlines()


def test_skypilots_first_node_trains_and_ends_with_the_trainers_code(tools, tmp_path):
    task, code, calls = _skypilot(tools, tmp_path, rank=0, CODE="3")
    assert code == 3
    health, start, wait = sorted(set(calls))
    assert health == "ray health-check --address=10.0.0.1:6379" and wait == "wait 10.0.0.1:6379 16"
    assert start.startswith("ray start --head --port=6379 --num-gpus=0 --include-dashboard=false ")
    module, script, *words = (tmp_path / "trainer").read_text().splitlines()
    vllm = _checked(words).rollout.vllm
    assert (module, script, vllm.address) == ("-m", "bin.train", "10.0.0.1:6379")
    assert task["resources"]["accelerators"] == "H100:8"
    _vllm_fits(vllm, 8 * (task["num_nodes"] - 1))
    assert (
        vllm.python == f"{tmp_path}/home/vllm/bin/python"
        and "~/vllm/bin/pip install" in task["setup"]
    )
    # Every request needs a token that the file does not hold, and nothing is opened.
    assert task["envs"] == {"RAY_AUTH_MODE": "token"} and task["secrets"] == {
        "RAY_AUTH_TOKEN": None
    }
    assert "ports" not in task["resources"]


def test_skypilots_other_nodes_join_again_until_the_trainers_ray_is_gone(tools, tmp_path):
    _, code, calls = _skypilot(tools, tmp_path, rank=2, HEALTHY="3")
    health = "ray health-check --address=10.0.0.1:6379"
    start = (
        "ray start --address=10.0.0.1:6379 --disable-usage-stats "
        "--dashboard-agent-listen-port=52366 --block"
    )
    assert (code, calls) == (0, [health, health, start, health, start, health])
    assert not (tmp_path / "trainer").exists()


def _slurm(tools, python):
    return tools(
        ray=_RAY + '\necho "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> "$SEEN/tokens"',
        # Runs its command here, and writes the options before it.
        srun='options=(); while [[ $1 == --* ]]; do options+=("$1"); shift; done\n'
        'echo "srun ${options[*]} $1" >> "$SEEN/calls"; exec "$@"',
        getent='echo "10.0.0.7 STREAM $2"; echo "10.0.0.7 DGRAM"',
        python=_WAIT + python,
        # Three times; so the loop of the other nodes ends.
        sleep='echo >> "$SEEN/slept"; test "$(wc -l < "$SEEN/slept")" -le 3',
    ) | {
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_ID": "123456",
        "SLURMD_NODENAME": "node7",
        "SLURM_GPUS_ON_NODE": "8",
    }


def test_slurms_script_trains_here_and_starts_engines_on_the_other_nodes(tools, tmp_path):
    given = _given_in_comment("ray_engines_slurm.sh")
    script = [_EXAMPLES / "ray_engines_slurm.sh", *given]
    environment = _slurm(
        tools,
        _PRINT + '; until [ "$(wc -l < "$SEEN/slept")" = 4 ]; do /bin/sleep 0.05; done; exit 5',
    )
    assert subprocess.run(script, env=environment, timeout=HANGS_S).returncode == 5
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:2] == [
        "srun --nodes=1 --ntasks=1 --exclude=node7 getent",
        "ray start --head --node-ip-address=10.0.0.7 --port=23456 --num-gpus=0 "
        "--include-dashboard=false --disable-usage-stats",
    ]
    start = "ray start --address=10.0.0.7:23456 --disable-usage-stats --block"
    calls.remove("wait 10.0.0.7:23456 16")
    assert calls[2:] == [
        "srun --nodes=2 --ntasks=2 --exclude=node7 --no-kill --kill-on-bad-exit=0 bash",
        *[start] * 3,  # the first of them failed
    ]
    [token] = set((tmp_path / "tokens").read_text().splitlines())
    assert re.fullmatch("token [0-9a-f]{64}", token)
    module, name, *words = (tmp_path / "trainer").read_text().splitlines()
    config = _checked(words)
    assert (module, name, config.rollout.vllm.address) == ("-m", "bin.train", "10.0.0.7:23456")
    _vllm_fits(config.rollout.vllm, 16)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", script[0].read_text(), re.M))
    assert (options["nodes"], options["gpus-per-node"], options["signal"]) == (
        "3",
        "8",
        "B:TERM@120",
    )
    assert "exclusive" in options and "no-kill" in options


def test_slurms_sigterm_reaches_the_trainer_which_saves_while_ray_lives(tools, tmp_path):
    save = 'trap "/bin/sleep 0.3; touch $SEEN/saved; exit 143" TERM; touch "$SEEN/ready"\n'
    save += "while :; do /bin/sleep 0.05; done"
    with subprocess.Popen(
        [_EXAMPLES / "ray_engines_slurm.sh"], env=_slurm(tools, save), start_new_session=True
    ) as script:
        wait_until((tmp_path / "ready").exists, "the trainer")
        script.send_signal(signal.SIGTERM)
        assert script.wait(HANGS_S) == 143
    assert (tmp_path / "saved").exists()
    assert "ray stop" not in (tmp_path / "calls").read_text()


def test_xpks_command_gives_each_pod_its_number_and_keeps_spaces(tools, tmp_path):
    environment = tools(xpk=_PRINT.replace("trainer", "xpk"), python=_PRINT)
    script = [_EXAMPLES / "several_hosts_xpk.sh", *_given_in_comment("several_hosts_xpk.sh")]
    place = {"CLUSTER": "c", "PROJECT": "p", "ZONE": "z", "IMAGE": "i"}
    missing = subprocess.run(
        script, env=environment, capture_output=True, text=True
    )  # no place is named
    assert missing.returncode == 1 and "set CLUSTER" in missing.stderr
    subprocess.run([*script, "--config.wandb.project=a b"], env=environment | place, check=True)
    words = (tmp_path / "xpk").read_text().splitlines()
    options = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
    assert words[:2] == ["workload", "create"] and options["num-nodes"] == "4"
    assert options["restart-on-exit-codes"] == "1"
    pod = {
        "JAX_COORDINATOR_ADDRESS": "pod0",
        "JAX_COORDINATOR_PORT": "6002",
        "NNODES": "4",
        "NODE_RANK": "3",
    }
    # As XPK runs it.
    subprocess.run(
        ["bash", "-c", f"({options['command']}) & wait $!"], env=environment | pod, check=True
    )
    module, name, *words = (tmp_path / "trainer").read_text().splitlines()
    hosts = _checked(words[:-1]).hosts
    assert (module, name, words[-1]) == ("-m", "bin.train", "--config.wandb.project=a b")
    assert (hosts.coordinator, hosts.processes, hosts.process) == ("pod0:6002", 4, 3)
    # The same run as the JobSet's.
    job_set = _objects("several_hosts_gke.yaml")["JobSet"]["spec"]
    [job] = job_set["replicatedJobs"]
    in_job_set = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"][0].split(
        "bin.train "
    )[1]
    assert set(_given_in_comment("several_hosts_xpk.sh")) == {
        w for w in in_job_set.split() if ".hosts." not in w
    }
    assert int(options["max-restarts"]) == job_set["failurePolicy"]["maxRestarts"]

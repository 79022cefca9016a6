"""The Hub: a push and a fetch against a local server, and what fails in one line."""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import jax
import pytest
from safetensors.numpy import load_file

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_hub import check_push, is_hub_name, model_directory
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import init_params
from tests.support.processes import CAPTURED

_ROOT = Path(__file__).resolve().parents[2]
_FETCH = "tests.models.fetch"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(http.server.BaseHTTPRequestHandler):
    """The calls of the Hub's interface that a push of small files and a fetch make."""

    protocol_version = "HTTP/1.1"

    def _answer(self, body: bytes | dict, status=200, headers=(), head=False):
        body = json.dumps(body).encode() if isinstance(body, dict | list) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        hub = self.server.files
        body = self._body()
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.server.refuses:
            return self._answer(
                {"error": "You don't have the rights to create a model under this namespace"}, 403
            )
        if self.path == "/api/repos/create":
            return self._answer(
                {"url": f"http://127.0.0.1:{self.server.server_port}/me/policy", "id": "me/policy"}
            )
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        assert "/commit/main" in self.path, self.path
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            if entry["key"] == "file":
                hub[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        url = f"http://127.0.0.1:{self.server.server_port}/me/policy/commit/{_COMMIT}"
        return self._answer(
            {"success": True, "commitOid": _COMMIT, "commitUrl": url, "hookOutput": ""}
        )

    def do_GET(self, head=False):
        path = unquote(self.path).partition("?")[0]
        self.server.asked.append((path, None))
        if not path.startswith(("/api/models/me/policy", "/me/policy/resolve/")):
            return self._answer(
                {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"}, head
            )
        if path.startswith("/api/"):
            if "/revision/" in path and not path.endswith(("/main", "/v1", _COMMIT)):
                return self._answer(
                    {"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"}, head
                )
            siblings = [{"rfilename": name} for name in self.server.files]
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": name}
                    for name, data in self.server.files.items()
                ]
                return self._answer(tree, head=head)
            return self._answer(
                {"id": "me/policy", "sha": _COMMIT, "siblings": siblings}, head=head
            )
        data = self.server.files[path.split("/", 5)[5]]
        return self._answer(data, 200, {"ETag": f'"{len(data)}"', "X-Repo-Commit": _COMMIT}, head)

    def do_HEAD(self):
        return self.do_GET(head=True)

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.files = {}
    server.asked = []
    server.refuses = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _run(hub, home, *words, **variables):
    """A command in a process of its own: the Hub's address and cache are read at import."""
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port if hub else 1}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "5",
        "PYTHONPATH": str(_ROOT),
        **variables,
    }
    return subprocess.run([sys.executable, "-m", *words], cwd=home, env=environment, **CAPTURED)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run's checkpoint, metrics and settings, without training."""
    import optax

    from dcmdp_jax.algorithm.dual import dual_init
    from dcmdp_jax.run import checkpoint
    from dcmdp_jax.training.state import new_state

    model = ModelConfig("qwen3", 104, 8, 12, 2, 4, 2, 4)
    run_dir = tmp_path_factory.mktemp("hub") / "run"
    saved = checkpoint.Checkpoints(run_dir, keep_last=2, keep_best=0)
    params = init_params(model, jax.random.key(0))
    saved.save(2, new_state(params, optax.adamw(1e-3), dual_init(0.0, tolerance=0.01)), model=model)
    saved.close()
    save_tokenizer(build_tokenizer(), run_dir / "tokenizer", (2, 3))
    save_params(params, model, run_dir.parent / "same", dtype="float32")
    return run_dir


def test_a_pushed_export_is_fetched_again_and_a_pinned_commit_needs_no_network(
    hub, run_dir, tmp_path
):
    export = ("bin.convert", "export", run_dir, tmp_path / "out", "--dtype=float32")
    pushed = _run(hub, tmp_path, *export, "--push=me/policy", HF_TOKEN="hf_stub")
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.endswith(
        f"pushed to http://127.0.0.1:{hub.server_port}/me/policy/commit/{_COMMIT}\n"
    )
    assert ("/api/repos/create", "Bearer hf_stub") in hub.asked
    local = {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()
    }
    assert (
        hub.files == local
        and {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= local.keys()
    )
    hub.files["modeling_policy.py"] = b"raise SystemExit('code of the Hub ran')"

    train = (
        "bin.train",
        "--config=demo:debug",
        "--config.mesh.cpu_devices=1",
        "--dry-run",
        "--config.rollout.max_rows=8",
        f"--config.run_dir={tmp_path / 'run'}",
    )
    name = f"me/policy@{_COMMIT}"
    fetched = _run(hub, tmp_path, *train, f"--config.model.path={name}")
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    assert f"{name}" in fetched.stdout and "3,064 parameters" in fetched.stdout
    [snapshot] = (tmp_path / "hub").glob("models--me--policy/snapshots/*")
    assert not (snapshot / "modeling_policy.py").exists()
    tensors = load_file(snapshot / "model.safetensors")
    ours = load_file(run_dir.parent / "same/model.safetensors")
    assert tensors.keys() == ours.keys() and all(
        (tensors[each] == ours[each]).all() for each in ours
    )
    # Without the server: what is pinned and fetched is there, what is not can't be.
    unreached = _run(None, tmp_path, _FETCH, name, "me/unseen")
    assert unreached.stdout.splitlines()[0] == str(snapshot)
    assert "no directory me/unseen, and it can't be fetched" in unreached.stdout.splitlines()[1]
    assert (
        "check name, network" in unreached.stdout.splitlines()[1]
        and len(unreached.stdout.splitlines()) == 2
    )
    absent = _run(hub, tmp_path, _FETCH, "me/policy@v9", "me/other").stdout.splitlines()
    assert (
        len(absent) == 2
        and "RevisionNotFoundError" in absent[0]
        and "RepositoryNotFoundError" in absent[1]
    )


def test_a_failed_push_is_one_line_and_the_export_stays(hub, run_dir, tmp_path):
    hub.refuses = True
    refused = _run(
        hub,
        tmp_path,
        "bin.convert",
        "export",
        run_dir,
        tmp_path / "out",
        "--push=me/policy",
        HF_TOKEN="hf_stub",
    )
    hub.refuses = False
    silent = _run(
        None,
        tmp_path,
        "bin.convert",
        "export",
        run_dir,
        tmp_path / "out2",
        "--push=me/policy",
        HF_TOKEN="hf_stub",
    )
    for done, out in ((refused, "out"), (silent, "out2")):
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert (
            f"The export is whole in {tmp_path / out}; `hf upload me/policy {tmp_path / out}` "
            "pushes it" in done.stderr
        )
        assert "hf_stub" not in done.stderr
        assert load_file(tmp_path / out / "model.safetensors")
    tokenless = _run(
        hub,
        tmp_path,
        "bin.convert",
        "export",
        run_dir,
        tmp_path / "out3",
        "--push=me/policy",
        HF_TOKEN="",
    )
    assert tokenless.returncode == 2 and "no token of the Hub" in tokenless.stderr
    assert not (tmp_path / "out3").exists()


def test_a_directory_wins_and_a_path_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "policy").mkdir(parents=True)
    assert model_directory("me/policy") == Path("me/policy") and not is_hub_name("me/policy")
    assert is_hub_name("Qwen/Qwen3-8B") and is_hub_name("Qwen/Qwen3-8B@refs/pr/1")
    for path in ("models/Qwen3-8B", "runs/mine", "/a/b", "./a/b", "a", "a/b/c", "../a/b", "a/b@"):
        assert not is_hub_name(path), path
        with pytest.raises(UserError, match="no directory"):
            model_directory(path)
    for name in ("policy", "me/policy@v1", "me/a b", "/me/policy", "me/policy/x"):
        with pytest.raises(UserError, match="must be USER/NAME"):
            check_push(name)

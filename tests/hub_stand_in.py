"""A stand-in for the Hugging Face Hub on this machine, as far as ``huggingface_hub`` needs it to upload a folder."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml
from flask import Flask, Response, jsonify, request
from werkzeug.serving import make_server

TOKEN = "hf_" + "a1b2" * 8


@dataclass
class Hub:
    """What the server knows, to be changed by tests."""

    url: str = ""
    user: dict[str, Any] = field(
        default_factory=lambda: {
            "type": "user",
            "name": "ada",
            "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "museum", "roleInOrg": "read"}],
            "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}},
        }
    )
    repos: dict[str, dict[str, Any]] = field(default_factory=dict)  # private, files, messages
    objects: dict[str, bytes] = field(default_factory=dict)  # of large files
    broken: str = ""  # a part of the paths that are answered with an error


@contextmanager
def serve_hub() -> Iterator[Hub]:  # noqa: C901, PLR0915  each statement is an address of the Hub
    """Serve an empty Hub, which knows one user by the token above."""
    hub, app = Hub(), Flask("hub")

    @app.before_request
    def refuse() -> Response | None:
        if hub.broken and hub.broken in request.path:
            return Response(
                json.dumps({"error": "storage is full"}), 507, headers={"X-Error-Message": "storage is full"}
            )
        is_object = request.path.startswith("/objects/")  # by an address that is secret itself
        if not is_object and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return Response(json.dumps({"error": "Invalid credentials"}), 401)
        return None

    @app.get("/api/whoami-v2")
    def whoami() -> Response:
        return jsonify(hub.user)

    @app.post("/api/validate-yaml")
    def validate_card() -> Response:
        """Refuse a base model that has no name of the Hub, as the Hub does."""
        header = yaml.safe_load(request.get_json()["content"].split("---")[1])
        errors = []
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", header.get("base_model", "a")):
            errors.append({"message": '"base_model" is not valid'})
        return Response(json.dumps({"errors": errors, "warnings": []}), 400 if errors else 200)

    @app.get("/api/models/<owner>/<name>")
    def model_info(owner: str, name: str) -> Response:
        repo = hub.repos.get(f"{owner}/{name}")
        if repo is None:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return Response(json.dumps({"error": "Repository not found"}), 404, headers=headers)
        return jsonify({"id": f"{owner}/{name}", "private": repo["private"], "tags": [], "siblings": []})

    @app.post("/api/repos/create")
    def create() -> Response:
        asked = request.get_json()
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repos:
            return Response(json.dumps({"url": f"{hub.url}/{name}"}), 409)
        hub.repos[name] = {"private": asked["visibility"] == "private", "files": {}, "messages": []}
        return jsonify({"url": f"{hub.url}/{name}"})

    @app.get("/api/models/<owner>/<name>/tree/main")
    def tree(owner: str, name: str) -> Response:
        files = hub.repos[f"{owner}/{name}"]["files"]
        return jsonify([{"type": "file", "path": p, "size": len(data), "oid": ""} for p, data in files.items()])

    @app.post("/api/models/<owner>/<name>/preupload/main")
    def preupload(owner: str, name: str) -> Response:
        files = [file["path"] for file in request.get_json()["files"]]
        modes = {path: "lfs" if path.endswith((".safetensors", ".gguf")) else "regular" for path in files}
        return jsonify({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    @app.post("/<owner>/<name>.git/info/lfs/objects/batch")
    def batch(owner: str, name: str) -> Response:
        asked = request.get_json()["objects"]
        made = [{**one, "actions": {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}} for one in asked]
        return jsonify({"transfer": "basic", "objects": made})

    @app.put("/objects/<oid>")
    def upload(oid: str) -> Response:
        hub.objects[oid] = request.get_data()
        return Response("")

    @app.post("/api/models/<owner>/<name>/commit/main")
    def commit(owner: str, name: str) -> Response:
        repo = hub.repos[f"{owner}/{name}"]
        for line in request.get_data().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repo["messages"].append(value["summary"])
            elif entry["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repo["files"][value["path"]] = hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del repo["files"][value["path"]]
        return jsonify({"commitOid": "c0ffee", "commitUrl": f"{hub.url}/{owner}/{name}/commit/c0ffee"})

    server = make_server("127.0.0.1", 0, app, threaded=True)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

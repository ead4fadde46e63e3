"""Clients that nobody here wrote, beside OpenAI's: litellm, llm, curl; and Prometheus's own parser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from edge_llm_server.keys import ApiKey
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.fakes import PARIS, make_core, says
from tests.server.harness import Running, running

KEY = "k" * 32
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: make_core(says(PARIS)), keys=(ApiKey.of("me", KEY),)) as made:
        yield made


LITELLM = """
import json, sys
import litellm
options = dict(model="openai/fake", api_base=sys.argv[1] + "/v1", api_key=sys.argv[2], temperature=0, num_retries=0)
messages = json.loads(sys.argv[3])
whole = litellm.completion(messages=messages, **options)
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=messages, stream=True, **options)]
try:
    litellm.completion(messages=[{"role": "user", "content": "x" * 2000}], **options)
    error = None
except litellm.ContextWindowExceededError as caught:
    error = "context"
except litellm.BadRequestError as caught:
    error = "bad request"
print(json.dumps([whole.choices[0].message.content, whole.usage.total_tokens, "".join(pieces), error]))
"""


def test_litellm(server: Running, tmp_path: Path) -> None:
    """In a process of its own: it changes much of what it is imported into."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LITELLM, server.url, KEY, json.dumps(CHAT)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    whole, tokens, pieces, error = json.loads(run.stdout.splitlines()[-1])
    assert whole == pieces == PARIS
    assert tokens > 30
    assert error == "context"


def test_llm(server: Running, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: edge\n  model_name: fake\n  api_base: {server.url}/v1\n  api_key_name: edge\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"edge": KEY}))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
    for options in ([], ["--no-stream"]):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "llm", "-m", "edge", "-o", "temperature", "0", *options, "capital?"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == PARIS


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(server: Running) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--no-buffer", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps({"messages": CHAT, "temperature": 0, "stream": True})
    options = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}", "-d", body]
    lines = [line for line in curl(f"{server.url}/v1/chat/completions", *options).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == PARIS
    unlabelled = curl(f"{server.url}/v1/chat/completions", "-w", "%{http_code}", "-H", options[3], "-d", body)
    assert unlabelled.endswith("415")  # curl calls it a form
    assert curl("-I", f"{server.url}/health").startswith("HTTP/1.1 200 OK")


def test_prometheus(server: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    httpx.post(f"{server.url}/v1/chat/completions", json={"messages": CHAT, "max_tokens": 3}, headers=headers)
    for retries in ("0", "2"):
        httpx.get(f"{server.url}/nowhere", headers={**headers, "x-stainless-retry-count": retries})
    reply = httpx.get(f"{server.url}/metrics", headers=headers)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert all(name.startswith("edge_llm:") for name in families)

    def value(family: str, sample: str, **labels: str) -> float:
        wanted = {"model_name": "fake", **labels}
        (found,) = [s for s in families[family].samples if s.name == sample and s.labels == wanted]
        return found.value

    assert value("edge_llm:num_requests_running", "edge_llm:num_requests_running") == 0
    assert value("edge_llm:generation_tokens", "edge_llm:generation_tokens_total") >= 3
    assert value("edge_llm:request_success", "edge_llm:request_success_total", finished_reason="length") >= 1
    requests = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in families["edge_llm:http_requests"].samples
    }
    assert requests["/v1/chat/completions", "200"] >= 1
    assert [sample.value for sample in families["edge_llm:client_retries"].samples] == [1]
    assert not any("nowhere" in path for path, _ in requests)
    assert requests["other", "404"] >= 1
    ttft = "edge_llm:time_to_first_token_seconds"
    assert families[ttft].type == "histogram"
    assert value(ttft, f"{ttft}_bucket", le="+Inf") == value(ttft, f"{ttft}_count") >= 1
    assert families["edge_llm:request_prompt_tokens"].type == "histogram"
    assert families["edge_llm:num_requests_running"].type == "gauge"
    assert families["edge_llm:num_steps"].type == "counter"
    assert value("edge_llm:prefix_cache_hits", "edge_llm:prefix_cache_hits_total", tier="memory") >= 0


def test_tokens_there_and_back(server: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}

    def post(path: str, **body: Any) -> Any:
        return httpx.post(server.url + path, json=body, headers=headers).json()

    tokens = post("/tokenize", content=PARIS)["tokens"]
    assert post("/detokenize", tokens=tokens)["content"] == PARIS
    assert post("/tokenize", prompt=PARIS)["count"] == len(tokens)
    chat = post("/tokenize", messages=CHAT)
    asked = post("/v1/chat/completions", messages=CHAT, max_tokens=1)
    assert chat["count"] == asked["usage"]["prompt_tokens"]
    assert "assistant" in post("/detokenize", tokens=chat["tokens"])["content"]
    assert post("/tokenize", content="a", prompt="b")["error"]["type"] == "invalid_request_error"
    assert post("/tokenize")["error"]["type"] == "invalid_request_error"
    assert post("/detokenize", tokens=[10**6])["error"]["param"] == "tokens"

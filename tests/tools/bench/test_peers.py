from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edge_llm.errors import ParameterError
from tools.bench.peers import MissingPeerError, Peer, read_peers

FAKE = "tests.tools.bench.fake_worker"


def peer(module: str = "json", **changes: object) -> Peer:
    values = {"python": ["some-package==1"], "worker": FAKE, "models": {"it": "", "it made": "small.bin"}, "flags": {}}
    return Peer("some peer", module=module, **{**values, **changes})


def test_a_missing_peer_names_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(MissingPeerError) as caught:
        peer(variables={"FLAGS": "-a -b"}).contestants(tmp_path / "m.gguf", "m-12", tmp_path)
    folder = f"'{tmp_path}/some peer'"
    pip = f"'{tmp_path}/some peer/bin/pip'"
    assert str(caught.value) == f"python3 -m venv {folder} && FLAGS='-a -b' {pip} install some-package==1"


def test_a_python_without_the_package_is_a_missing_peer(tmp_path: Path) -> None:
    with pytest.raises(MissingPeerError, match="pip' install some-package"):
        peer("no_such_module").contestants(tmp_path / "m.gguf", "m-12", tmp_path, Path(sys.executable))


def test_its_model_is_made_once(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"abc")
    for _ in range(2):
        plain, made = peer().contestants(source, "m-12", tmp_path, Path(sys.executable))
        assert (plain.name, plain.model, made.name) == ("it", str(source), "it made")
        assert Path(made.model) == tmp_path / "models" / "m-12-some peer-small.bin"
        assert Path(made.model).read_bytes() == b"cba"
        os.chmod(made.model, 0o444)  # a second time would have to replace it


def test_a_model_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.touch()
    with pytest.raises(
        MissingPeerError, match=r"m-12-some peer-small.bin could not be made .*the file is empty.* pip install torch$"
    ):
        peer(needs=["torch"]).contestants(source, "m-12", tmp_path, Path(sys.executable))
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m-12-some peer-small.bin.log"]


def test_the_file_of_peers_is_sound() -> None:
    peers = read_peers(["llama.cpp", "llama.cpp-amx", "genai", "openvino"])
    columns = [column for peer in peers for column in peer.models]
    assert len(set(columns)) == len(columns) == 6
    for known in peers:
        assert Path(*known.worker.split(".")).with_suffix(".py").is_file()


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match="no peer is called ollama") as caught:
        read_peers(["ollama"])
    assert caught.value.hint == "known are: llama.cpp, llama.cpp-amx, genai, openvino"

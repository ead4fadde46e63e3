"""The program in the surroundings that people really have: few CPUs, no CPU facts, no home, no network, and privacy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT
from tests.cli.test_end_to_end import own_home, program  # noqa: F401 - own_home is a fixture of every test here

ANSWER = ("run", "Hi", "--max-tokens", "4", "--seed", "1")


def script(text: str, *arguments: str) -> list[str]:
    """What a script run in a process of its own has printed, word by word; it must end well and silently."""
    result = subprocess.run(
        [sys.executable, "-c", text, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split()


NETWORK_WATCHED = """
import sys
touched = []
sys.addaudithook(lambda event, _: touched.append(event) if event.startswith("socket.") else None)
from edge_llm_cli.main import run
try:
    run()
finally:
    sys.stderr.write("".join(f"touched {event}\\n" for event in touched))
"""


@pytest.mark.parametrize(
    ("arguments", "piped"),
    [
        (ANSWER, ""),
        (("chat", "--plain", "--max-tokens", "4"), "Hi\nAgain\n"),
        (("run", "Hi", "--raw", "--max-tokens", "4", "--json"), ""),
    ],
)
def test_no_socket_is_made(tiny_folder: Path, arguments: tuple[str, ...], piped: str) -> None:
    """B37: not one attempt, which a machine without a network could not tell from silence. Sees Python's sockets only."""
    command = [sys.executable, "-c", NETWORK_WATCHED, *arguments, "-m", str(tiny_folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, input=piped)
    assert result.returncode == 0, result.stderr
    assert "touched" not in result.stderr


ON_ONE_CPU = """
import os, sys
one = {max(os.sched_getaffinity(0))}
if sys.argv[2] == "masked":
    os.sched_setaffinity(0, one)
from pathlib import Path
from edge_llm.config import EngineConfig
from edge_llm.engine import assembly
from edge_llm import Engine, SamplingParams
asked = []
class Watched(assembly.Session):
    def __init__(self, *args, threads, **options):
        asked.append(threads)
        super().__init__(*args, threads=threads, **options)
assembly.Session = Watched
ids = []
for threads in (None, 64):
    with Engine.open(Path(sys.argv[1]), EngineConfig(context=256, threads=threads)) as engine:
        handle = engine.complete("one two three " * 8, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        handle.text()
        ids.append(handle.finished.token_ids)
        if sys.argv[2] == "masked":
            assert all(os.sched_getaffinity(int(task)) == one for task in os.listdir("/proc/self/task"))
assert ids[0] == ids[1]
print(max(asked), *ids[0])
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_threads_stay_within_the_affinity_mask(tiny_folder: Path) -> None:
    """B33: one CPU of many is one thread, also where more are asked for; the answer is the same."""
    threads, *ids = script(ON_ONE_CPU, str(tiny_folder), "masked")
    assert threads == "1"
    assert script(ON_ONE_CPU, str(tiny_folder), "free")[1:] == ids


def test_a_machine_whose_cpus_cannot_be_read(tiny_folder: Path) -> None:
    """B34: /sys/devices/system/cpu is empty, as in sandboxes; ONNX Runtime looks there too."""
    hidden = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    hide = "mount -t tmpfs none /sys/devices/system/cpu"
    if shutil.which("unshare") is None or subprocess.run([*hidden, hide], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    result = program(*ANSWER, "-m", str(tiny_folder), prefix=(*hidden, f'{hide} && exec "$@"', "sh"))
    plain = program(*ANSWER, "-m", str(tiny_folder))
    assert (result.returncode, result.stdout, result.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become nobody in particular")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_user_without_a_home_can_install_models(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B30: no HOME, a number that no user has, and site-packages that cannot be written. (Kernels without a folder of
    their own are tested in tests/kernels/test_warmup.py.)"""
    nobody = ("setpriv", "--reuid", "54321", "--clear-groups")
    if subprocess.run(
        [*nobody, sys.executable, "-c", "import edge_llm_cli"], check=False, capture_output=True
    ).returncode:
        pytest.skip("other users cannot read this Python")
    monkeypatch.delenv("EDGE_LLM_HOME")
    monkeypatch.delenv("HOME", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setenv("TMPDIR", folder)
        source = Path(shutil.copy(tiny_gguf, folder))
        source.chmod(0o644)
        for arguments in (("import", str(source), "--name", "mine"), ("models", "verify", "mine"), ("models", "list")):
            result = program(*arguments, prefix=nobody)
            assert result.returncode == 0, result.stderr
            assert "mine" in result.stdout or "verify" in arguments
        assert Path(folder, "edge-llm-54321", "data", "models", "mine", "weights.bin").is_file()


def test_a_home_that_cannot_be_written(
    tiny_folder: Path,
    own_home: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same answer, and one line that says where compiled kernels are and what is not kept."""
    plain = program(*ANSWER, "-m", str(tiny_folder), "--private")
    assert plain.returncode == 0, plain.stderr
    instead = tmp_path / "temporary" / f"edge-llm-{os.geteuid()}" / "cache"
    instead.mkdir(parents=True, mode=0o700)
    instead.parent.chmod(0o700)
    (own_home / "cache" / "kernels").rename(instead / "kernels")  # as the first start would have left it
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    prefix = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    if prefix and (shutil.which("setpriv") is None or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("root that passes all rights")
    folders = [own_home, *(path for path in own_home.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        result = program(*ANSWER, "-m", str(tiny_folder), prefix=prefix)
    finally:
        for folder in folders:
            folder.chmod(0o700)
    assert (result.returncode, result.stdout) == (0, plain.stdout)
    notices = [text for text in result.stderr.splitlines() if "cannot be written" in text]
    assert len(notices) == 1
    assert f"compiled kernels are kept in {instead}/kernels: " in notices[0]
    assert "what is read is not kept for the next start: " in notices[0]


IDLE = """
import sys, time
from pathlib import Path
from edge_llm import Engine, EngineConfig, SamplingParams
with Engine.open(Path(sys.argv[1]), EngineConfig(context=256)) as engine:
    engine.complete("one two three " * 8, SamplingParams(max_tokens=16, ignore_eos=True)).text()
    before = time.process_time()  # of all threads; os.times() counts in hundredths only
    time.sleep(2)
    print(time.process_time() - before)
"""


def test_a_loaded_model_that_waits_uses_no_cpu(tiny_folder: Path) -> None:
    """B35: 2 % of two seconds is what we promise; a pool that spins takes all of them."""
    (seconds,) = script(IDLE, str(tiny_folder))
    assert float(seconds) < 0.2


SECRET, RULES = "xyzzy private words", "plugh secret rules"


@pytest.mark.parametrize("private", [(), ("--private",)])
@pytest.mark.parametrize(
    ("arguments", "piped"),
    [
        (("run", SECRET, "--system", RULES), ""),
        (("run", "Hi"), SECRET),
        (("run", "--raw", SECRET, "--json"), ""),
        (("chat", "--plain", "--system", RULES), f"{SECRET}\n/system {RULES}\n{SECRET}\n"),
    ],
)
def test_no_word_of_a_conversation_is_stored(
    tiny_folder: Path,
    own_home: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    piped: str,
    private: tuple[str, ...],
) -> None:
    """B60: nothing keeps conversations yet, so nothing is found even without --private."""
    places = [own_home, *(tmp_path / name for name in ("user", "temporary", "state"))]
    for name, place in zip(("HOME", "TMPDIR", "XDG_STATE_HOME"), places[1:], strict=True):
        place.mkdir()
        monkeypatch.setenv(name, str(place))
    result = program(*arguments, "-m", str(tiny_folder), "--max-tokens", "4", *private, input=piped)
    assert result.returncode == 0, result.stderr
    words = [word.encode() for text in (SECRET, RULES) for word in text.split()[:1]]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert not [path for path in files if any(word in path.read_bytes() for word in words)]

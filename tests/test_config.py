"""EngineConfig and its sources, and what it takes from the machine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from edge_llm import machine
from edge_llm.config import EngineConfig, default_context, default_threads, load_config
from edge_llm.errors import ParameterError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    (tmp_path / "config").mkdir()
    return tmp_path


def write_config(home: Path, text: str) -> Path:
    path = home / "config" / "config.toml"
    path.write_text(text)
    return path


def test_later_sources_win(home: Path) -> None:
    assert load_config(env={}) == EngineConfig()
    write_config(home, "[engine]\ncontext = 1000\nslots = 2\nthreads = 1\n")
    env = {"EDGE_LLM_SLOTS": "3", "EDGE_LLM_THREADS": "4", "EDGE_LLM_HOME": "/x", "PATH": "/bin"}
    config = load_config(env=env, threads=5, kv_type=None)
    assert (config.context, config.slots, config.threads, config.kv_type) == (1000, 3, 5, None)


def test_a_draft_model_is_named_with_the_way_to_speculate() -> None:
    assert load_config(env={"EDGE_LLM_SPECULATION": "draft:small"}).draft_model == "small"
    assert EngineConfig(speculation="draft:draft:C:\\x").draft_model == "draft:C:\\x"
    assert EngineConfig().draft_model is EngineConfig(speculation="off").draft_model is None


@pytest.mark.parametrize(
    ("text", "env", "arguments", "words"),
    [
        ("[engine]\nthread = 1", {}, {}, ["thread in", "config.toml", "did you mean threads?"]),
        ("[engine]\nthreads = true", {}, {}, ["threads in", "config.toml", "True"]),
        ("[engine]\nslots = '4'", {}, {}, ["slots in", "config.toml", "'4'"]),
        ("slots = 4", {}, {}, ["slots", "config.toml", "[engine]"]),
        ("engine = 4", {}, {}, ["engine", "config.toml"]),
        ("[engine]\nprivate = true", {}, {}, ["private under [engine]", "config.toml"]),
        ("[privacy]\nslots = 4", {}, {}, ["slots under [privacy]", "config.toml"]),
        ("[privacy]\nprivate = 1", {}, {}, ["private in", "config.toml", "true or false"]),
        ("", {"EDGE_LLM_PRIVATE": "maybe"}, {}, ["EDGE_LLM_PRIVATE", "true or false", "'maybe'"]),
        ("[engine\n", {}, {}, ["config.toml", "TOML"]),
        ("[engine]\nx=" + "[" * 5000, {}, {}, ["config.toml", "TOML"]),
        ("", {"EDGE_LLM_SLOTS": "many"}, {}, ["EDGE_LLM_SLOTS", "'many'"]),
        ("", {"EDGE_LLM_SLOTS": "0"}, {}, ["EDGE_LLM_SLOTS", "1", "1024"]),
        ("", {"EDGE_LLM_KV_TYPE": "int4"}, {}, ["EDGE_LLM_KV_TYPE", "int8", "f32", "'int4'"]),
        ("", {"EDGE_LLM_CONTEXTS": "1"}, {}, ["EDGE_LLM_CONTEXTS", "did you mean context?"]),
        ("", {}, {"context": 0}, ["context (argument)", "0"]),
        ("", {"EDGE_LLM_SPECULATION": "draft:"}, {}, ["EDGE_LLM_SPECULATION", "off, lookup or draft:MODEL"]),
        ("[engine]\nspeculation = true", {}, {}, ["speculation in", "config.toml", "draft:MODEL"]),
        ("[engine]\nspeculate = 'off'", {}, {}, ["did you mean speculation?"]),
        ("", {}, {"colour": "red"}, ["colour (argument)", "the settings are"]),
    ],
)
def test_faults_say_where_they_stand(
    home: Path, text: str, env: dict[str, str], arguments: dict[str, object], words: list[str]
) -> None:
    write_config(home, text)
    with pytest.raises(ParameterError) as caught:
        load_config(env=env, **arguments)
    message = f"{caught.value} {caught.value.hint}"
    assert "\n" not in str(caught.value)
    assert all(word in message for word in words), message


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="no config file"):
        load_config(tmp_path / "missing.toml", env={})
    with pytest.raises(ParameterError, match="cannot read"):
        load_config(tmp_path, env={})


def test_options_are_validated_together() -> None:
    config = EngineConfig(slots=4, max_chunk=4)
    assert config.with_options(slots=2).slots == 2
    assert config.queue_limit == 16
    assert config.with_options(max_queued_requests=0).queue_limit == 0
    with pytest.raises(ParameterError, match="max_chunk"):
        config.with_options(slots=5)
    with pytest.raises(ParameterError, match="context_policy"):
        EngineConfig(context_policy="half")


def test_a_program_s_own_defaults_come_before_everything(home: Path) -> None:
    own = {"context_policy": "slide", "slots": 2}
    config = load_config(env={}, defaults=own, slots=3)
    assert (config.context_policy, config.slots) == ("slide", 3)
    write_config(home, "[engine]\ncontext_policy = 'error'\n")
    assert load_config(env={}, defaults=own).context_policy == "error"
    assert load_config(env={"EDGE_LLM_CONTEXT_POLICY": "slide"}).context_policy == "slide"


def test_every_field_is_explained() -> None:
    lines = Path(load_config.__code__.co_filename).read_text(encoding="utf-8").splitlines()
    for field in fields(EngineConfig):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        assert lines[at + 1].startswith('    """'), field.name


# --- the machine -----------------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def siblings(*groups: tuple[int, ...]) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(map(str, group)) + "\n"
        for group in groups
        for cpu in group
    }


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: frozenset(range(8)))


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 8),
        (siblings((0, 4), (1, 5), (2, 6), (3, 7)), 4),
        (siblings(*((cpu, cpu + 64) for cpu in range(64))), 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_threads_follow_affinity_and_quota(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    """B33: what the process may use counts, not what the host has."""
    assert default_threads(tree(tmp_path, files)) == threads


def test_threads_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B34: no /proc, no /sys, files that are folders, no affinity call."""
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert default_threads(tmp_path) == 1
    assert default_threads(tmp_path / "missing") == 1


def test_context_fits_the_memory(tmp_path: Path) -> None:
    assert default_context(2048, 12_000, tmp_path) == 2048
    assert default_context(100_000, 12_000, tmp_path) == 8192
    tree(tmp_path, {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable:  200000 kB\n"})
    assert default_context(100_000, 12_000, tmp_path) == 200_000 * 1024 // 4 // 12_000
    assert default_context(100, 12_000, tmp_path) == 100
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": str(100 << 20),
            "sys/fs/cgroup/box/memory.current": str(80 << 20),
            "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {28 << 20}\n",
        },
    )
    assert machine.available_memory(tmp_path) == 48 << 20
    assert default_context(100_000, 12_000, tmp_path) == (48 << 20) // 4 // 12_000
    tree(tmp_path, {"sys/fs/cgroup/box/memory.current": str(120 << 20)})
    assert default_context(100_000, 1_000_000, tmp_path) == 256


@pytest.mark.parametrize(
    ("text", "env", "stored"),
    [
        ("", {}, False),
        ("[engine]\nprefix_cache = 'disk'", {}, True),
        ("[engine]\nprefix_cache = 'disk'\n[privacy]\nprivate = true", {}, False),
        ("[privacy]\nprivate = true", {"EDGE_LLM_PREFIX_CACHE": "disk", "EDGE_LLM_PRIVATE": "0"}, True),
        ("", {"EDGE_LLM_PREFIX_CACHE": "disk", "EDGE_LLM_PRIVATE": "TRUE"}, False),
    ],
)
def test_privacy_wins_over_the_prefix_cache(home: Path, text: str, env: dict[str, str], stored: bool) -> None:
    write_config(home, text)
    assert load_config(env=env).stores_prefixes is stored


def test_a_folder_in_the_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path))
    (tmp_path / "config" / "config.toml").mkdir(parents=True)
    with pytest.raises(ParameterError, match=r"config\.toml: Is a directory") as caught:
        load_config()
    assert caught.value.hint
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "file"))
    assert load_config().context is None, "a home that is a file holds no settings, and is told of where it is needed"

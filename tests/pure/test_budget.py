"""Sizes as text, the arithmetic of an estimate, and the room a cgroup leaves, on files laid out by hand."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import errors, memory, settings
from edgekv.budget import parse_size

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 128,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 4096,
    "llama.vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("256MiB", 256 << 20),
        ("2GiB", 2 << 30),
        ("300MB", 300_000_000),
        ("1.5 GB", 1_500_000_000),
        ("1.5GiB", 3 << 29),
        (" 64 kb ", 64_000),
        ("1KiB", 1024),
        ("0.0000001 TB", 100_000),
        ("900 B", 900),
        (12345, 12345),
    ],
)
def test_sizes(text: int | str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "256",
            "MiB",
            "256M",
            "256Mi",
            "-1MB",
            "1e3MB",
            "nan",
            "nan GB",
            "inf GB",
            "1,5 GB",
            "1 iB",
            "1.MB",
            ".5GB",
        ),
        *("0MB", "0.1 B", "1 PB", "٣MB", 0, -5, float("nan"), 1e9, True, b"1GB"),
    ],
)
def test_other_sizes_are_refused(text: object) -> None:
    with pytest.raises(errors.UsageError, match=r"is not a size|at least one byte"):
        parse_size(text)  # type: ignore[arg-type]


@given(st.integers(1, 1 << 50))
def test_a_number_and_its_text_are_the_same(num_bytes: int) -> None:
    assert parse_size(f"{num_bytes} B") == parse_size(num_bytes) == num_bytes
    assert parse_size(f"{num_bytes}KiB") == 1024 * num_bytes


def need(n_ctx: int = 1024, kv_type: str = "f16", n_batch: int = 512, **changes: object) -> memory.MemoryEstimate:
    return memory.estimate({**LLAMA, **changes}, 10**6, n_ctx, kv_type, n_batch, free=1 << 40)


def test_more_of_anything_needs_more() -> None:
    least = need()
    assert least.cache == 1024 * 2 * 2 * (2 * 32) * 2  # cells, layers, K and V, two heads of 32, two bytes
    assert least.process == least.total + least.program == least.weights + least.cache + least.buffers + memory.PROGRAM
    for more in (need(n_ctx=2048), need(n_batch=1024), need(**{"llama.vocab_size": 10**6})):
        assert more.process > least.process
        assert more.address_space(1) > least.address_space(1)
    assert need(kv_type="q4_0").cache < need(kv_type="q8_0").cache < least.cache
    assert least.address_space(2) > least.address_space(1) + (64 << 20)  # a stack and an arena


def test_without_flash_attention_k_times_q_is_kept() -> None:
    with_it = memory.estimate(LLAMA, 0, 8192, "f16", 512, free=0)
    without = memory.estimate(LLAMA, 0, 8192, "f16", 512, flash_attention=False, free=0)
    assert without.buffers - with_it.buffers > 512 * 8192 * 4 * 4  # four heads, four bytes


def test_experts_and_layerwise_widths_are_seen() -> None:
    assert need(**{"llama.expert_feed_forward_length": 512, "llama.expert_used_count": 8}).buffers > need().buffers
    assert need(**{"llama.feed_forward_length": [256, 4096]}).buffers > need().buffers
    layered = need(**{"llama.attention.head_count_kv": [2, 0]})
    assert layered.cache == need().cache // 2


def test_quantised_rows_are_whole_blocks() -> None:
    assert memory.check_head_size(LLAMA, "q8_0")
    odd = {**LLAMA, "llama.attention.key_length": 48}
    assert memory.check_head_size(odd, "f16")
    assert not memory.check_head_size(odd, "q4_0")


def test_the_largest_context_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    free = need(n_ctx=0).total + 1_000_000
    monkeypatch.setattr(memory, "free_ram", lambda: free)
    largest = memory.largest_context(LLAMA, 10**6, "f16", 512)
    assert 0 < largest < 4096 and largest % 256 == 0
    assert memory.estimate(LLAMA, 10**6, largest, "f16", 512, free=free).fits
    assert not memory.estimate(LLAMA, 10**6, largest + 256, "f16", 512, free=free).fits
    monkeypatch.setattr(memory, "free_ram", lambda: 1000)
    assert memory.largest_context(LLAMA, 10**6, "f16", 512) == 0
    monkeypatch.setattr(memory, "free_ram", lambda: 1 << 40)
    assert memory.largest_context({**LLAMA, "llama.context_length": 1000}, 0, "f16", 512) == 1000


# ---- cgroups --------------------------------------------------------------------------------------------------------

V1 = {
    "memory.limit_in_bytes": "500000000",
    "memory.usage_in_bytes": "300000000",
    "memory.stat": "total_inactive_file 150000000\ntotal_active_file 50000000\ntotal_mapped_file 80000000\n",
}
V2 = {
    "memory.max": "500000000",
    "memory.current": "300000000",
    "memory.stat": "inactive_file 150000000\nactive_file 50000000\nfile_mapped 80000000\n",
}


@pytest.mark.parametrize("files", [V1, V2])
def test_room_counts_what_the_kernel_would_drop(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory._room_in(tmp_path) == 500_000_000 - 300_000_000 + 120_000_000


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    with pytest.raises(ValueError, match="max"):
        memory._room_in(tmp_path)
    assert memory._cgroup_room() > 0


def system(folder: Path, groups: str, files: dict[str, str]) -> Path:
    """A /proc and a /sys of one's own."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


CPU, V1_GROUPS = "sys/fs/cgroup/cpu", "4:memory:/box\n3:cpu,cpuacct:/box/inner\n1:name=systemd:/\n0::/"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ("0::/box/inner", {"sys/fs/cgroup/box/cpu.max": "150000 100000"}, 1.5),  # of the group above
        (
            "0::/box/inner",
            {"sys/fs/cgroup/box/inner/cpu.max": "max 100000", "sys/fs/cgroup/box/cpu.max": "200000 50000"},
            4.0,
        ),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "90000 100000", "sys/fs/cgroup/a/b/cpu.max": "80000 100000"}, 0.8),
        ("0::/of/the/host", {"sys/fs/cgroup/cpu.max": "25000 100000"}, 0.25),  # in a container
        (
            V1_GROUPS,
            {f"{CPU}/box/inner/cpu.cfs_quota_us": "50000", f"{CPU}/box/inner/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        (V1_GROUPS, {f"{CPU}/box/inner/cpu.cfs_quota_us": "-1", f"{CPU}/box/inner/cpu.cfs_period_us": "100000"}, None),
        (V1_GROUPS, {f"{CPU}/cpu.cfs_quota_us": "300000", f"{CPU}/cpu.cfs_period_us": "100000"}, 3.0),
        ("0::/", {"sys/fs/cgroup/cpu.max": "100000 0"}, None),
        ("0::/", {"sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ("0::/", {}, None),
        ("not as the kernel writes it", {}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, groups: str, files: dict[str, str], quota: float | None) -> None:
    assert settings.cpu_quota(system(tmp_path, groups, files)) == quota
    assert settings.cpu_quota(tmp_path / "no such system") is None


@pytest.mark.parametrize(
    ("cores", "cpus", "quota", "threads"),
    [
        (4, {0, 1, 2, 3, 4, 5, 6, 7}, None, 4),
        (4, {0, 1}, None, 2),
        (None, {0, 1, 2}, None, 3),
        (4, {0, 1, 2, 3}, 0.5, 1),
        (4, {0, 1, 2, 3}, 1.9, 1),
        (4, {0, 1, 2, 3}, 3.0, 3),
        (4, {0, 1}, 3.5, 2),
        (2, {0, 1, 2, 3}, 64.0, 2),
    ],
)
def test_threads_are_as_many_as_can_run(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, cpus: set[int], quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else cores)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: cpus, raising=False)
    monkeypatch.setattr(settings, "cpu_quota", lambda: quota)
    assert settings.Settings().threads == threads
    assert settings.Settings(n_threads=7).threads == 7  # what is asked for stays

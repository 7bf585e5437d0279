"""What a process holds."""

from __future__ import annotations

from pathlib import Path


def peak_mib(pid: int) -> int:
    """Peak resident memory so far, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    raise AssertionError(f"no peak is known of process {pid}")

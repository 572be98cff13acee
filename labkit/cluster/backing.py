"""The folder of the files by which ranks of one host share memory, where /dev/shm is too small."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from labkit.common.errors import InvalidInput

SHARED = Path("/dev/shm")
SEGMENT = 16 << 20  # bytes that Open MPI takes for each rank
BUCKETS = 256 << 20  # bytes for gradients
# Open MPI's names of that folder, one for each of its parts.
FOLDERS = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "OMPI_MCA_osc_rdma_backing_directory",
    "OMPI_MCA_shmem_mmap_backing_file_base_dir",
)
RELOCATES = "OMPI_MCA_shmem_mmap_relocate_backing_file"


def backing(ranks: int, places: Sequence[Path], shared: Path = SHARED) -> dict[str, str]:
    """Return the variables that name another folder; none where /dev/shm has room enough.

    Args:
        ranks: how many share memory.
        places: folders in its stead, the best first.
        shared: /dev/shm.

    Raises:
        InvalidInput: no folder has room enough; a rank would die of SIGBUS in the midst of a step.
    """
    wanted = ranks * SEGMENT + BUCKETS
    if not shared.is_dir() or any(name in os.environ for name in FOLDERS):
        return {}  # another system has no such folder, and a person may have chosen one
    rooms = {place: shutil.disk_usage(place).free for place in (shared, *places)}
    path = next((place for place, room in rooms.items() if room >= wanted), None)
    if path is None:
        told = ", ".join(f"{place} has {room >> 20} MiB free" for place, room in rooms.items())
        raise InvalidInput(
            f"{ranks} ranks share {wanted >> 20} MiB of memory through files, and {told}; give "
            f"more: mount -o remount,size=2G {shared}  # docker run --shm-size=2g"
        )
    if path == shared:
        return {}
    return dict.fromkeys(FOLDERS, str(path)) | {RELOCATES: "-1"}

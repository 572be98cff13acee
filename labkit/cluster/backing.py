"""The choice of a folder for MPI's shared-memory files if /dev/shm is too small."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from labkit.common.errors import InvalidInput

SHARED = Path("/dev/shm")
SEGMENT = 16 << 20  # bytes of shared memory that Open MPI needs per rank
BUCKETS = 256 << 20  # total bytes of shared memory for the gradient buckets
# Each shared-memory component of Open MPI has its own variable for the folder of its files.
FOLDERS = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "OMPI_MCA_osc_rdma_backing_directory",
    "OMPI_MCA_shmem_mmap_backing_file_base_dir",
)
RELOCATES = "OMPI_MCA_shmem_mmap_relocate_backing_file"


def backing_variables(ranks: int, places: Sequence[Path], shared: Path = SHARED) -> dict[str, str]:
    """Return variables that set another shared-memory folder; {} if /dev/shm is large enough.

    Args:
        ranks: Number of ranks that share memory.
        places: Alternative folders in order of preference.
        shared: Path of /dev/shm.

    Raises:
        InvalidInput: No folder has enough free space. A rank that runs out of shared memory would
            die of SIGBUS during a step.
    """
    required = ranks * SEGMENT + BUCKETS
    if not shared.is_dir() or any(name in os.environ for name in FOLDERS):
        return {}  # the system has no /dev/shm, or the user has chosen a folder
    free = {place: shutil.disk_usage(place).free for place in (shared, *places)}
    path = next((place for place, size in free.items() if size >= required), None)
    if path is None:
        sizes = ", ".join(f"{place} has {size >> 20} MiB free" for place, size in free.items())
        raise InvalidInput(
            f"{ranks} ranks share {required >> 20} MiB of memory through files, but {sizes}; "
            f"make the file system larger: mount -o remount,size=2G {shared}  # docker run "
            "--shm-size=2g"
        )
    if path == shared:
        return {}
    return dict.fromkeys(FOLDERS, str(path)) | {RELOCATES: "-1"}
